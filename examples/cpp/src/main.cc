// A tour of a tokenwire server: makes every call once and prints one line per response.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "error.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "multiplex.h"
#include "tokenwire/v1/engine_service.grpc.pb.h"

namespace tw = tokenwire::v1;
using Engine = tw::EngineService::Stub;

namespace {

// "The capital of France is" in SmolLM2's tokens, continued greedily by 8 tokens.
tw::GenerationInput GreedyInput() {
  tw::GenerationInput input;
  for (const auto token : {504, 3575, 282, 4649, 314}) input.add_prompt_token_ids(token);
  input.mutable_sampling_params()->set_temperature(0);
  input.mutable_sampling_params()->set_max_tokens(8);
  return input;
}

template <typename Tokens>
void Print(const char* what, tw::FinishReason reason, const Tokens& token_ids) {
  std::cout << what << ": " << tw::FinishReason_Name(reason);
  for (const auto token : token_ids) std::cout << ' ' << token;
  std::cout << '\n';
}

grpc::Status Health(const std::shared_ptr<grpc::Channel>& channel) {
  using grpc::health::v1::HealthCheckResponse;
  const auto health = grpc::health::v1::Health::NewStub(channel);
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(tw::EngineService::service_full_name());
  HealthCheckResponse response;
  const auto status = health->Check(&context, request, &response);
  if (status.ok()) std::cout << "health: " << HealthCheckResponse::ServingStatus_Name(response.status()) << '\n';
  return status;
}

grpc::Status Generate(Engine& engine) {
  grpc::ClientContext context;
  tw::GenerateRequest request;
  *request.mutable_input() = GreedyInput();
  tw::GenerateResponse response;
  const auto status = engine.Generate(&context, request, &response);
  if (!status.ok()) return status;
  for (const auto& output : response.outputs()) Print("generate", output.finish_reason(), output.token_ids());
  std::cout << "usage: " << response.usage().prompt_tokens() << ' ' << response.usage().completion_tokens() << '\n';
  return status;
}

grpc::Status GenerateStream(Engine& engine) {
  grpc::ClientContext context;
  tw::GenerateStreamRequest request;
  *request.mutable_input() = GreedyInput();
  const auto stream = engine.GenerateStream(&context, request);
  std::vector<std::uint32_t> tokens;
  auto finish = tw::FINISH_REASON_UNSPECIFIED;
  tw::GenerateStreamResponse response;
  while (stream->Read(&response)) {
    for (const auto& output : response.outputs()) {
      tokens.insert(tokens.end(), output.token_ids().begin(), output.token_ids().end());
      finish = output.finish_reason();
    }
  }
  const auto status = stream->Finish();
  if (status.ok()) Print("stream", finish, tokens);
  return status;
}

grpc::Status Abort(Engine& engine, const std::string& request_id) {
  grpc::ClientContext context;
  tw::AbortRequest request;
  request.add_request_ids(request_id);
  tw::AbortResponse response;
  const auto status = engine.Abort(&context, request, &response);
  for (const auto& result : response.results()) {
    std::cout << "abort: " << tw::AbortOutcome_Name(result.outcome()) << '\n';
  }
  return status;
}

// Aborts a request by its id, from a separate call. The aborted stream ends with ABORT, not with an error.
grpc::Status AbortedStream(Engine& engine) {
  grpc::ClientContext context;
  tw::GenerateStreamRequest request;
  *request.mutable_input() = GreedyInput();
  request.mutable_input()->set_request_id("cpp-" + std::to_string(getpid()));
  request.mutable_input()->mutable_sampling_params()->set_max_tokens(1000);
  request.mutable_input()->mutable_sampling_params()->set_ignore_eos(true);
  const auto stream = engine.GenerateStream(&context, request);
  auto finish = tw::FINISH_REASON_UNSPECIFIED;
  tw::GenerateStreamResponse response;
  while (stream->Read(&response)) {
    // Only the first message has the id.
    if (!response.request_id().empty()) {
      const auto status = Abort(engine, response.request_id());
      if (!status.ok()) {
        context.TryCancel();
        return status;
      }
    }
    for (const auto& output : response.outputs()) finish = output.finish_reason();
  }
  const auto status = stream->Finish();
  if (status.ok()) std::cout << "aborted stream: " << tw::FinishReason_Name(finish) << '\n';
  return status;
}

// Programs branch on an error's reason; its message is for humans.
void Refused(Engine& engine) {
  grpc::ClientContext context;
  tw::GenerateRequest request;
  *request.mutable_input() = GreedyInput();
  request.mutable_input()->mutable_sampling_params()->set_top_p(2);
  tw::GenerateResponse response;
  const auto error = ErrorOf(engine.Generate(&context, request, &response));
  std::cout << "refused: " << error.reason;
  for (const auto& field : error.fields) std::cout << ' ' << field;
  std::cout << '\n';
}

// Exits if a call failed unexpectedly.
void Check(const grpc::Status& status) {
  if (status.ok()) return;
  std::cerr << "error " << status.error_code() << ' ' << ErrorOf(status).reason << ": " << status.error_message() << '\n';
  std::exit(EXIT_FAILURE);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:50051";
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const auto engine = tw::EngineService::NewStub(channel);

  Check(Health(channel));
  Check(Generate(*engine));
  Check(GenerateStream(*engine));
  Check(Multiplex(*engine, GreedyInput()));
  Check(AbortedStream(*engine));
  Refused(*engine);
  return EXIT_SUCCESS;
}
