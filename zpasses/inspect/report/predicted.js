// Predicted time: what is achieved, what is possible within the memory budget, and the bound.

// How far a graph is from what a schedule could achieve, and from what none can.
function predicted({ total_us, possible_us, bound_us, limit_bytes }) {
  const within = limit_bytes ? bytesText(limit_bytes) : "the budgets";
  const rows = [
    ["achieved", total_us, "achieved", "The graph after its last pass"],
    ["possible", possible_us, `possible within ${within}`, "With the plan of the pass schedule"],
    ["bound", bound_us, "bound", "No schedule of these collectives is faster"],
  ];
  const most = Math.max(total_us, possible_us, 1e-9);
  return el(
    "div",
    { class: "predicted", role: "group", "aria-label": "Predicted time" },
    rows.map(([kind, us, text, title]) => {
      const style = { width: `${((100 * us) / most).toFixed(1)}%` };
      return el(
        "div",
        { class: "predicted-row", title },
        muted(text),
        span("predicted-track", el("span", { class: `predicted-bar ${kind}`, style })),
        span("right", timeText(us)),
      );
    }),
  );
}

// The same of the whole step: of all graphs that run.
function predictedStep(compile) {
  const known = compile.executed.filter((graph) => graph.prediction);
  if (known.length < 2) return null;
  const [total_us, possible_us, bound_us] = ["total_us", "possible_us", "bound_us"].map((key) =>
    sumOf(known, (graph) => graph.prediction[key]),
  );
  const names = known.map((graph) => graph.name).join(" and ");
  const over = total_us > bound_us ? ((total_us - bound_us) / total_us) * 100 : 0;
  const text = `${names}; at most ${over.toFixed(1)} % can be saved by another order`;
  const figures = predicted({ total_us, possible_us, bound_us, limit_bytes: 0 });
  return card("The step", "", muted(text), figures);
}
