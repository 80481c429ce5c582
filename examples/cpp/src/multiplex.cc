#include "multiplex.h"

#include <cstdint>
#include <iostream>
#include <map>
#include <utility>
#include <vector>

namespace tw = tokenwire::v1;

namespace {

// The tokens of each sequence so far, by handle and index.
using Sequences = std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::uint32_t>>;

tw::MultiplexRequest Submit(std::uint32_t handle, const tw::GenerationInput& input) {
  tw::MultiplexRequest request;
  request.mutable_submit()->set_handle(handle);
  *request.mutable_submit()->mutable_input() = input;
  return request;
}

// Appends the tokens of a step's entries to their sequences.
void AddTokens(const tw::MultiplexStep& step, Sequences& sequences) {
  auto token = step.token_ids().begin();
  for (int entry = 0; entry < step.handles_size(); ++entry) {
    // An empty column stands for the default of every entry: sequence 0, one token.
    const auto index = step.indexes().empty() ? 0 : step.indexes(entry);
    const auto count = step.token_counts().empty() ? 1 : step.token_counts(entry);
    auto& tokens = sequences[{step.handles(entry), index}];
    tokens.insert(tokens.end(), token, token + count);
    token += count;
  }
}

void PrintError(std::uint32_t handle, const tw::ErrorStatus& status) {
  std::cout << "multiplex " << handle << ": " << status.reason();
  for (const auto& violation : status.field_violations()) std::cout << ' ' << violation.field();
  std::cout << '\n';
}

void PrintEnds(const tw::MultiplexStep& step, const Sequences& sequences) {
  for (const auto& finish : step.finished()) {
    std::cout << "multiplex " << finish.handle() << '.' << finish.index() << ": "
              << tw::FinishReason_Name(finish.finish_reason());
    const auto found = sequences.find({finish.handle(), finish.index()});
    // A sequence that finished without a token is missing.
    if (found != sequences.end()) {
      for (const auto token : found->second) std::cout << ' ' << token;
    }
    std::cout << '\n';
  }
  for (const auto& rejection : step.rejected()) PrintError(rejection.handle(), rejection.status());
  for (const auto& failure : step.failed()) PrintError(failure.handle(), failure.status());
}

}  // namespace

grpc::Status Multiplex(tw::EngineService::Stub& engine, const tw::GenerationInput& greedy) {
  // Two sequences, with several tokens per message.
  tw::GenerationInput two = greedy;
  two.mutable_sampling_params()->clear_temperature();
  two.mutable_sampling_params()->set_n(2);
  two.mutable_sampling_params()->set_seed(7);
  two.mutable_sampling_params()->set_stream_interval(4);

  tw::GenerationInput wrong = greedy;
  wrong.mutable_sampling_params()->set_top_p(2);

  grpc::ClientContext context;
  const auto stream = engine.Multiplex(&context);
  stream->Write(Submit(1, greedy));
  stream->Write(Submit(2, two));
  stream->Write(Submit(3, wrong));
  // A coordinator keeps writing, in a separate thread from the one that reads. Half-closing lets requests in flight
  // finish, then the server ends the stream.
  stream->WritesDone();

  Sequences sequences;
  tw::MultiplexResponse response;
  while (stream->Read(&response)) {
    // Ignore events that this program does not know or did not ask for.
    if (!response.has_step()) continue;
    AddTokens(response.step(), sequences);
    // After the tokens, since a finish can be in the same message.
    PrintEnds(response.step(), sequences);
  }
  return stream->Finish();
}
