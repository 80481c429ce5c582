package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"google.golang.org/protobuf/proto"

	pb "tokenwire.example/gen/tokenwire/v1"
)

// sequence identifies one sequence of a request by its handle and index.
type sequence struct{ handle, index uint32 }

func submit(handle uint32, params *pb.SamplingParams) *pb.MultiplexRequest {
	input := &pb.GenerationInput{PromptTokenIds: prompt, SamplingParams: params}
	return &pb.MultiplexRequest{
		Action: &pb.MultiplexRequest_Submit{Submit: &pb.MultiplexSubmit{Handle: handle, Input: input}},
	}
}

// addTokens appends the tokens of a step's entries to their sequences.
func addTokens(step *pb.MultiplexStep, tokens map[sequence][]uint32) {
	rest := step.TokenIds
	for entry, handle := range step.Handles {
		// An empty column stands for the default of every entry: sequence 0, one token.
		index, count := uint32(0), uint32(1)
		if len(step.Indexes) > 0 {
			index = step.Indexes[entry]
		}
		if len(step.TokenCounts) > 0 {
			count = step.TokenCounts[entry]
		}
		key := sequence{handle, index}
		tokens[key] = append(tokens[key], rest[:count]...)
		rest = rest[count:]
	}
}

func printEnds(step *pb.MultiplexStep, tokens map[sequence][]uint32) {
	for _, finish := range step.Finished {
		ids := tokens[sequence{finish.Handle, finish.Index}]
		fmt.Printf("multiplex %d.%d: %s %s\n", finish.Handle, finish.Index, finish.FinishReason, join(ids))
	}
	for _, rejection := range step.Rejected {
		printError(rejection.Handle, rejection.Status)
	}
	for _, failure := range step.Failed {
		printError(failure.Handle, failure.Status)
	}
}

func printError(handle uint32, status *pb.ErrorStatus) {
	var fields []string
	for _, violation := range status.FieldViolations {
		fields = append(fields, violation.Field)
	}
	fmt.Printf("multiplex %d: %s %s\n", handle, status.Reason, join(fields))
}

// multiplex runs several requests on one bidirectional stream.
func multiplex(ctx context.Context, engine pb.EngineServiceClient) error {
	stream, err := engine.Multiplex(ctx)
	if err != nil {
		return err
	}
	for _, request := range []*pb.MultiplexRequest{
		submit(1, greedy()),
		// Two sequences, with several tokens per message.
		submit(2, &pb.SamplingParams{
			N: proto.Uint32(2), Seed: proto.Int64(7), MaxTokens: proto.Uint32(8), StreamInterval: proto.Uint32(4),
		}),
		submit(3, &pb.SamplingParams{TopP: proto.Float64(2)}),
	} {
		if err := stream.Send(request); err != nil {
			return err
		}
	}
	// A coordinator keeps sending, in a separate goroutine from the one that receives. Half-closing lets requests in
	// flight finish, then the server ends the stream.
	if err := stream.CloseSend(); err != nil {
		return err
	}
	tokens := map[sequence][]uint32{}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		// Nil for events that this program does not know or did not ask for.
		if step := response.GetStep(); step != nil {
			addTokens(step, tokens)
			// After the tokens, since a finish can be in the same message.
			printEnds(step, tokens)
		}
	}
}

// join formats values separated by spaces.
func join(values interface{}) string {
	return strings.Trim(fmt.Sprint(values), "[]")
}
