// A tour of a tokenwire server: makes every call once and prints one line per response.
import { create } from "@bufbuild/protobuf";
import { ConnectError, createClient, type Client } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { Health, HealthCheckResponse_ServingStatus } from "./gen/grpc/health/v1/health_pb.js";
import { AbortOutcome, EngineService } from "./gen/tokenwire/v1/engine_service_pb.js";
import { FinishReason, GenerationInputSchema, type SequenceOutput } from "./gen/tokenwire/v1/generation_pb.js";
import { multiplex } from "./multiplex.js";

type Engine = Client<typeof EngineService>;

const prompt = [504, 3575, 282, 4649, 314]; // "The capital of France is", in SmolLM2's tokens
const greedy = { temperature: 0, maxTokens: 8 };

async function generate(engine: Engine): Promise<void> {
  const { outputs, usage } = await engine.generate({
    input: { promptTokenIds: prompt, samplingParams: greedy },
  });
  for (const output of outputs) {
    console.log("generate:", FinishReason[output.finishReason], ...output.tokenIds);
  }
  console.log("usage:", usage?.promptTokens, usage?.completionTokens);
}

async function generateStream(engine: Engine): Promise<void> {
  const tokens: number[] = [];
  let finish = FinishReason.UNSPECIFIED;
  for await (const { outputs } of engine.generateStream({
    input: { promptTokenIds: prompt, samplingParams: greedy },
  })) {
    for (const output of outputs) {
      tokens.push(...output.tokenIds);
      finish = output.finishReason;
    }
  }
  console.log("stream:", FinishReason[finish], ...tokens);
}

// Aborts a request by its id, from a separate call. The aborted stream ends with ABORT, not with an error.
async function abort(engine: Engine): Promise<void> {
  const input = create(GenerationInputSchema, {
    requestId: `node-${process.pid}`,
    promptTokenIds: prompt,
    samplingParams: { maxTokens: 1000, ignoreEos: true },
  });
  let last: SequenceOutput | undefined;
  for await (const { requestId, outputs } of engine.generateStream({ input })) {
    // Only the first message has the id.
    if (requestId) {
      const { results } = await engine.abort({ requestIds: [requestId] });
      for (const { outcome } of results) console.log("abort:", AbortOutcome[outcome]);
    }
    last = outputs.at(-1) ?? last;
  }
  console.log("aborted stream:", FinishReason[last?.finishReason ?? FinishReason.UNSPECIFIED]);
}

// Programs branch on an error's reason; its message is for humans.
async function refused(engine: Engine): Promise<void> {
  try {
    await engine.generate({ input: { promptTokenIds: prompt, samplingParams: { topP: 2 } } });
  } catch (error) {
    if (!(error instanceof ConnectError)) throw error;
    const [info] = error.findDetails(ErrorInfoSchema);
    const fields = error.findDetails(BadRequestSchema).flatMap((details) => details.fieldViolations);
    console.log("refused:", info?.reason, ...fields.map(({ field }) => field));
  }
}

async function main(address: string): Promise<void> {
  const transport = createGrpcTransport({ baseUrl: `http://${address}` });
  const engine = createClient(EngineService, transport);

  const { status } = await createClient(Health, transport).check({ service: EngineService.typeName });
  console.log("health:", HealthCheckResponse_ServingStatus[status]);
  await generate(engine);
  await generateStream(engine);
  await multiplex(engine, prompt);
  await abort(engine);
  await refused(engine);
}

try {
  await main(process.argv[2] ?? "127.0.0.1:50051");
} catch (error) {
  console.error(ConnectError.from(error).message);
  process.exit(1);
}
