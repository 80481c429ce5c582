// A tour of a tokenwire server: makes every call once and prints one line per response.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "tokenwire.example/gen/tokenwire/v1"
)

// "The capital of France is", in SmolLM2's tokens.
var prompt = []uint32{504, 3575, 282, 4649, 314}

func greedy() *pb.SamplingParams {
	return &pb.SamplingParams{Temperature: proto.Float64(0), MaxTokens: proto.Uint32(8)}
}

func health(ctx context.Context, conn *grpc.ClientConn) error {
	request := &healthpb.HealthCheckRequest{Service: "tokenwire.v1.EngineService"}
	response, err := healthpb.NewHealthClient(conn).Check(ctx, request)
	if err != nil {
		return err
	}
	fmt.Println("health:", response.Status)
	return nil
}

func generate(ctx context.Context, engine pb.EngineServiceClient) error {
	input := &pb.GenerationInput{PromptTokenIds: prompt, SamplingParams: greedy()}
	response, err := engine.Generate(ctx, &pb.GenerateRequest{Input: input})
	if err != nil {
		return err
	}
	for _, output := range response.Outputs {
		fmt.Println("generate:", output.FinishReason, join(output.TokenIds))
	}
	fmt.Println("usage:", response.Usage.PromptTokens, response.Usage.CompletionTokens)
	return nil
}

func generateStream(ctx context.Context, engine pb.EngineServiceClient) error {
	input := &pb.GenerationInput{PromptTokenIds: prompt, SamplingParams: greedy()}
	stream, err := engine.GenerateStream(ctx, &pb.GenerateStreamRequest{Input: input})
	if err != nil {
		return err
	}
	var tokens []uint32
	var finish pb.FinishReason
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		for _, output := range response.Outputs {
			tokens = append(tokens, output.TokenIds...)
			finish = output.FinishReason
		}
	}
	fmt.Println("stream:", finish, join(tokens))
	return nil
}

// Aborts a request by its id, from a separate call. The aborted stream ends with ABORT, not with an error.
func abort(ctx context.Context, engine pb.EngineServiceClient) error {
	input := &pb.GenerationInput{
		RequestId:      fmt.Sprintf("go-%d", os.Getpid()),
		PromptTokenIds: prompt,
		SamplingParams: &pb.SamplingParams{MaxTokens: proto.Uint32(1000), IgnoreEos: proto.Bool(true)},
	}
	stream, err := engine.GenerateStream(ctx, &pb.GenerateStreamRequest{Input: input})
	if err != nil {
		return err
	}
	var finish pb.FinishReason
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		// Only the first message has the id.
		if response.RequestId != "" {
			answer, err := engine.Abort(ctx, &pb.AbortRequest{RequestIds: []string{response.RequestId}})
			if err != nil {
				return err
			}
			for _, result := range answer.Results {
				fmt.Println("abort:", result.Outcome)
			}
		}
		for _, output := range response.Outputs {
			finish = output.FinishReason
		}
	}
	fmt.Println("aborted stream:", finish)
	return nil
}

// Programs branch on an error's reason; its message is for humans.
func refused(ctx context.Context, engine pb.EngineServiceClient) error {
	input := &pb.GenerationInput{PromptTokenIds: prompt, SamplingParams: &pb.SamplingParams{TopP: proto.Float64(2)}}
	_, err := engine.Generate(ctx, &pb.GenerateRequest{Input: input})
	var reason string
	var fields []string
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fields = append(fields, violation.Field)
			}
		}
	}
	fmt.Println("refused:", reason, join(fields))
	return nil
}

func run(address string) error {
	conn, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx := context.Background()
	if err := health(ctx, conn); err != nil {
		return err
	}
	engine := pb.NewEngineServiceClient(conn)
	for _, step := range []func(context.Context, pb.EngineServiceClient) error{
		generate, generateStream, multiplex, abort, refused,
	} {
		if err := step(ctx, engine); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if err := run(address); err != nil {
		log.Fatal(err)
	}
}
