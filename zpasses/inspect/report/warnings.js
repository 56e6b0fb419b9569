// What the page says instead of, or above, a view: a failed pass, a graph without estimates, and
// addresses that name something that the dump does not have.

function failure(error, where) {
  if (!error) return null;
  return el(
    "section",
    { class: "failure", role: "alert" },
    el("h2", {}, `${where || "This compile failed"}${error.where ? ` in ${error.where}` : ""}`),
    el("p", {}, `${error.type}: ${error.message}`),
    error.raised &&
      !error.message.includes(error.raised) &&
      el("p", {}, `raised at ${error.raised}`),
    error.traceback &&
      el("details", {}, el("summary", {}, "Traceback"), el("pre", {}, error.traceback)),
  );
}

// Above every view of a graph that a failed pass left.
function failedStep(step) {
  if (!step.error) return null;
  const box = failure({ ...step.error, where: "" }, `${step.error.where || step.after} failed`);
  if (current.graph)
    box.append(el("p", {}, "What is shown is the graph that it left, which may be wrong."));
  return box;
}

// The memory and cost models cover aten ops, and not the ops that Dynamo captures.
function isModelled(step) {
  return step.level !== "captured";
}

function notModelled() {
  return el(
    "p",
    { class: "muted pad" },
    "This is the graph that Dynamo captured. The memory and cost models start at the joint graph.",
  );
}

function notWritten() {
  return el("p", { class: "muted pad" }, "The dump does not contain this graph.");
}

// The joint graph is split into forward and backward before it runs.
function isExecuted(name) {
  return !["captured", "joint"].includes(name);
}

// A graph that runs and does not fit into the target's memory. The wording is that of `list`.
function overCapacity(compile, name, peak) {
  const memory = compile.target.memory_bytes;
  if (typeof memory !== "number" || memory <= 0 || !isExecuted(name)) return null;
  let shards = 0;
  for (const [, bytes] of Object.values(compile.parameters)) shards += bytes;
  if (peak + shards <= memory) return null;
  return el(
    "p",
    { class: "over", role: "alert" },
    `${name} does not fit into the memory of ${compile.target.name || "the target"}, ` +
      `${bytesText(memory)}: its peak is ${bytesText(peak)}, and the shards of the parameters take ` +
      `${bytesText(shards)}. Inputs and the optimizer's state come on top.`,
  );
}
