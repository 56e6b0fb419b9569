// What a trace says, beside the prediction: how much of it is that of nodes, a run of a graph, and
// its modules.

// How much of the measured time of collectives is that of nodes, and where the rest is.
function joinedNote(compile) {
  if (!compile.joined) return null;
  return el(
    "section",
    { class: "card joined" },
    el("header", {}, el("h2", {}, "Joined with the trace")),
    compile.joined.map((line) => el("p", {}, line)),
  );
}

// Measured time of a node that is no collective, or undefined.
function measuredOperator(graph, node) {
  return graph.step.measured && graph.step.measured.operators[node.id];
}

// For a panel or a tooltip: "12 µs (predicted 8 µs)", or "".
function measuredNode(graph, node) {
  const time = measuredOperator(graph, node);
  return time === undefined || time === null || time === false
    ? ""
    : `${timeText(time)} (predicted ${timeText(node.cost)})`;
}

function measuredCollective(collective) {
  return collective.measured
    ? `${timeText(collective.measured[0])}, ${timeText(collective.measured[1])} exposed`
    : "";
}

// A run as it was measured, in the scale of the bar of the estimate.
function measuredBreakdown(graph) {
  const found = graph.step.measured;
  if (!found) return null;
  const [total] = found.total,
    [exposed] = found.exposed,
    [compute] = found.compute;
  const rest = Math.max(0, total - exposed - compute);
  const share = (time) => `${(100 * Math.min(time, total)) / (total || 1)}%`;
  return el(
    "div",
    { class: "split measured-split" },
    el(
      "p",
      {},
      el("b", {}, timeText(total)),
      ` measured in ${plural(found.runs, "run")}, ${timeText(found.total[1])} predicted: `,
      el("b", {}, timeText(compute)),
      ` compute of nodes (predicted ${timeText(found.compute[1])} for the same nodes), `,
      el("b", { class: "exposed-text" }, timeText(exposed)),
      ` exposed (predicted ${timeText(found.exposed[1])}), and ${timeText(rest)} of no node: ` +
        "fused kernels, and Python.",
    ),
    el(
      "div",
      {
        class: "stack",
        role: "img",
        "aria-label": "Measured shares of compute, exposed communication, and of no node",
      },
      el("i", { style: { background: "var(--compute)", width: share(compute) } }),
      el("i", { style: { background: "var(--exposed)", width: share(exposed) } }),
    ),
  );
}

const MEASURED_COLUMNS = [
  ["module", 'Modules; "*" stands for the numbers of equal layers'],
  ["times", "Number of modules"],
  ["compute", "Predicted time of the operators that the trace measured"],
  ["measured", "Their measured time"],
  ["collectives", "Predicted time of collectives, by the bytes of the module's parameters"],
  ["measured", "Their measured time"],
  ["exposed", "Predicted time for which compute waits for them"],
  ["measured", "The measured time"],
];

// Predicted and measured time of each module.
function measuredModules(graph) {
  const found = graph.step.measured;
  if (!found || !found.modules.length) return null;
  return el(
    "section",
    { class: "card measured-modules" },
    el("header", {}, el("h2", {}, "Predicted and measured, by module")),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "compact" },
        tableHead(MEASURED_COLUMNS, (at) => at > 0),
        el(
          "tbody",
          {},
          found.modules.map(([name, layers, ...times]) =>
            el(
              "tr",
              {},
              el("td", {}, name),
              el("td", { class: "right" }, countText(layers)),
              times.map((time) => el("td", { class: "right" }, timeText(time))),
            ),
          ),
        ),
      ),
    ),
  );
}
