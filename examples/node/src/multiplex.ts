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

// The runs of new tokens in a step's columns.
function* entries(step: MultiplexStep): Generator<Entry> {
  let start = 0;
  for (const [position, handle] of step.handles.entries()) {
    // A column that is left out says what holds for all: one token each, sequence 0.
    const end = start + (step.tokenCounts[position] ?? 1);
    yield { handle, index: step.indexes[position] ?? 0, tokenIds: step.tokenIds.slice(start, end) };
    start = end;
  }
}

// What this side says. A coordinator yields for as long as it has something to say; after the end of its side, running
// requests finish and the server ends the stream.
async function* actions(prompt: number[]): AsyncGenerator<Action> {
  yield submit(1, { promptTokenIds: prompt, samplingParams: { temperature: 0, maxTokens: 8 } });
  // Two sequences, with several tokens in a message.
  yield submit(2, { promptTokenIds: prompt, samplingParams: { n: 2, seed: 7n, maxTokens: 8, streamInterval: 4 } });
  yield submit(3, { promptTokenIds: prompt, samplingParams: { topP: 2 } });
}

export async function multiplex(engine: Client<typeof EngineService>, prompt: number[]): Promise<void> {
  const tokens = new Map<string, number[]>();
  for await (const { event } of engine.multiplex(actions(prompt))) {
    // One that this program does not know or has not asked for.
    if (event.case !== "step") continue;
    const step = event.value;
    for (const { handle, index, tokenIds } of entries(step)) {
      const key = `${handle}.${index}`;
      tokens.set(key, [...(tokens.get(key) ?? []), ...tokenIds]);
    }
    // After the tokens: a finish may come in the same message.
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
