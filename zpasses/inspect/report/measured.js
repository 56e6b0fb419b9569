// What a trace says, beside the prediction: how much of it is that of nodes, a run of a graph, and
// its modules.

// How much of the measured time of collectives is that of nodes, and where the rest is.
function joinedNote(compile) {
  const lines = compile.joined && compile.joined.map((text) => el("p", {}, text));
  return lines && card("Joined with the trace", "joined", null, lines);
}

// A run of a graph in one sentence.
function measuredText(found) {
  if (!found) return null;
  const pair = (name) => `${timeText(found[name][0])} (predicted ${timeText(found[name][1])})`;
  const [rise, expected] = (found.rise || []).map(bytesText);
  return el(
    "p",
    { class: "measured" },
    el("b", {}, `Measured in ${plural(found.runs, "run")}: `),
    `${pair("total")}; collectives ${pair("communication")}; exposed ${pair("exposed")}. `,
    rise && `Memory rises by ${rise} (predicted ${expected}).`,
  );
}

// The measured time of a node that is no collective: "12 µs (predicted 8 µs)", or "".
function measuredNode(graph, node) {
  const time = graph.step.measured?.operators[node.id];
  return time === undefined ? "" : `${timeText(time)} (predicted ${timeText(node.cost)})`;
}

function measuredCollective({ measured }) {
  return measured ? `${timeText(measured[0])}, ${timeText(measured[1])} exposed` : "";
}

// A run as it was measured, in the scale of the bar of the estimate.
function measuredBreakdown(graph) {
  const found = graph.step.measured;
  if (!found) return null;
  const [total] = found.total,
    [exposed] = found.exposed,
    [compute] = found.compute;
  const rest = Math.max(0, total - exposed - compute);
  const share = (time) => Math.min(time, total) / (total || 1);
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
    stack("Measured shares of compute, exposed communication, and of no node", [
      ["var(--compute)", share(compute)],
      ["var(--exposed)", share(exposed)],
    ]),
  );
}

const MEASURED_COLUMNS = [
  ["module", 'Modules; "*" stands for the numbers of equal layers'],
  ["times", "Number of modules", "right"],
  ["compute", "Predicted time of the operators that the trace measured", "right"],
  ["measured", "Their measured time", "right"],
  ["collectives", "Predicted time of collectives, by bytes of the module's parameters", "right"],
  ["measured", "Their measured time", "right"],
  ["exposed", "Predicted time for which compute waits for them", "right"],
  ["measured", "The measured time", "right"],
];

// Predicted and measured time of each module.
function measuredModules(graph) {
  const found = graph.step.measured;
  if (!found || !found.modules.length) return null;
  const rows = found.modules.map(([name, layers, ...times]) => [
    name,
    countText(layers),
    ...times.map(timeText),
  ]);
  const title = "Predicted and measured, by module";
  return card(title, "measured-modules", null, table(MEASURED_COLUMNS, rows));
}
