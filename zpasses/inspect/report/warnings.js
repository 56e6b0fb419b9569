// What the page says instead of, or above, a view: a failed pass, a graph without estimates, and
// addresses that name something that the dump does not have.

function failure(error, where) {
  if (!error) return null;
  const { message, raised, traceback } = error;
  return el(
    "section",
    { class: "failure", role: "alert" },
    el("h2", {}, `${where || "This compile failed"}${error.where ? ` in ${error.where}` : ""}`),
    el("p", {}, `${error.type}: ${message}`),
    raised && !message.includes(raised) && el("p", {}, `raised at ${raised}`),
    traceback && el("details", {}, el("summary", {}, "Traceback"), el("pre", {}, traceback)),
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
const isModelled = (step) => step.level !== "captured";

const NOT_MODELLED =
  "This is the graph that Dynamo captured. The memory and cost models start at the joint graph.";
const notModelled = () => remark(NOT_MODELLED);

const notWritten = () => remark("The dump does not contain this graph.");

// The joint graph is split into forward and backward before it runs.
const isExecuted = (name) => !["captured", "joint"].includes(name);

// That a graph does not fit into the target's memory.
function overCapacity(step, style = "over") {
  return step.warning && el("p", { class: style, role: "alert" }, step.warning);
}
