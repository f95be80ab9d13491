// Sends the spans of a plan (JSON on stdin) with the OpenTelemetry SDK for JavaScript, as an application would.
const { SpanKind, SpanStatusCode, context, trace } = require("@opentelemetry/api");
const { BasicTracerProvider, BatchSpanProcessor } = require("@opentelemetry/sdk-trace-base");
const { resourceFromAttributes } = require("@opentelemetry/resources");

const EXPORTERS = {
  "grpc": "@opentelemetry/exporter-trace-otlp-grpc",
  "http/protobuf": "@opentelemetry/exporter-trace-otlp-proto",
  "http/json": "@opentelemetry/exporter-trace-otlp-http",
};

async function main() {
  const plan = JSON.parse(require("fs").readFileSync(0, "utf8"));
  const { OTLPTraceExporter } = require(EXPORTERS[plan.protocol]);
  const exporter = new OTLPTraceExporter({ url: plan.url, compression: plan.compression });
  const provider = new BasicTracerProvider({
    resource: resourceFromAttributes(plan.resource),
    spanProcessors: [new BatchSpanProcessor(exporter)],
  });
  const made = [];
  for (const one of plan.spans) {
    const parent = one.parent === null ? context.active() : trace.setSpan(context.active(), made[one.parent]);
    const span = provider.getTracer(one.scope).startSpan(
      one.name,
      {
        kind: SpanKind[one.kind],
        startTime: one.start,
        attributes: one.attributes,
        links: one.links.map((index) => ({ context: made[index].spanContext() })),
      },
      parent,
    );
    for (const event of one.events) span.addEvent(event.name, event.attributes, event.at);
    if (one.error) span.setStatus({ code: SpanStatusCode.ERROR, message: one.error });
    made.push(span);
  }
  // A child ends before its parent.
  for (let index = made.length - 1; index >= 0; index--) made[index].end(plan.spans[index].end);
  await provider.forceFlush();
  await provider.shutdown();
}

main().catch((problem) => {
  console.error(problem);
  process.exit(1);
});
