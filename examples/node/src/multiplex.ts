// Several requests on one bidirectional stream.
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";
import type { EngineService, MultiplexRequestSchema } from "./gen/tokenwire/v1/engine_service_pb.js";
import { FinishReason, type GenerationInputSchema } from "./gen/tokenwire/v1/generation_pb.js";
import type { MultiplexStep } from "./gen/tokenwire/v1/multiplex_pb.js";

type Action = MessageInitShape<typeof MultiplexRequestSchema>;

const submit = (handle: number, input: MessageInitShape<typeof GenerationInputSchema>): Action => ({
  action: { case: "submit", value: { handle, input } },
});

interface Entry {
  readonly handle: number;
  readonly index: number;
  readonly tokenIds: number[];
}

// Yields the entries of a step: runs of new tokens of one sequence.
function* entries(step: MultiplexStep): Generator<Entry> {
  let start = 0;
  for (const [position, handle] of step.handles.entries()) {
    // An empty column stands for the default of every entry: one token, sequence 0.
    const end = start + (step.tokenCounts[position] ?? 1);
    yield { handle, index: step.indexes[position] ?? 0, tokenIds: step.tokenIds.slice(start, end) };
    start = end;
  }
}

// The client's messages. A coordinator keeps yielding as requests arrive. Returning half-closes the stream: requests in
// flight finish, then the server ends it.
async function* actions(prompt: number[]): AsyncGenerator<Action> {
  yield submit(1, { promptTokenIds: prompt, samplingParams: { temperature: 0, maxTokens: 8 } });
  // Two sequences, with several tokens per message.
  yield submit(2, { promptTokenIds: prompt, samplingParams: { n: 2, seed: 7n, maxTokens: 8, streamInterval: 4 } });
  yield submit(3, { promptTokenIds: prompt, samplingParams: { topP: 2 } });
}

export async function multiplex(engine: Client<typeof EngineService>, prompt: number[]): Promise<void> {
  const tokens = new Map<string, number[]>();
  for await (const { event } of engine.multiplex(actions(prompt))) {
    // Ignore events that this program does not know or did not ask for.
    if (event.case !== "step") continue;
    const step = event.value;
    for (const { handle, index, tokenIds } of entries(step)) {
      const key = `${handle}.${index}`;
      tokens.set(key, [...(tokens.get(key) ?? []), ...tokenIds]);
    }
    // After the tokens, since a finish can be in the same message.
    for (const { handle, index, finishReason } of step.finished) {
      const key = `${handle}.${index}`;
      console.log(`multiplex ${key}:`, FinishReason[finishReason], ...(tokens.get(key) ?? []));
    }
    for (const { handle, status } of [...step.rejected, ...step.failed]) {
      const fields = status?.fieldViolations.map(({ field }) => field) ?? [];
      console.log(`multiplex ${handle}:`, status?.reason, ...fields);
    }
  }
}
