// Predicted time: what is achieved, what is possible within the memory budget, and the bound.

// How far a graph is from what a schedule could achieve, and from what none can.
function predicted(prediction) {
  const { total_us, possible_us, bound_us, limit_bytes } = prediction;
  const share = (us) => `${((100 * us) / Math.max(total_us, possible_us, 1e-9)).toFixed(1)}%`;
  const bar = (kind, us, text, title) =>
    el(
      "div",
      { class: "predicted-row", title },
      el("span", { class: "muted" }, text),
      el("span", { class: "predicted-track" }, [
        el("span", { class: `predicted-bar ${kind}`, style: { width: share(us) } }),
      ]),
      el("span", { class: "right" }, timeText(us)),
    );
  return el(
    "div",
    { class: "predicted", role: "group", "aria-label": "Predicted time" },
    bar("achieved", total_us, "achieved", "The graph after its last pass"),
    bar(
      "possible",
      possible_us,
      limit_bytes ? `possible within ${bytesText(limit_bytes)}` : "possible within the budgets",
      "With the plan of the pass schedule",
    ),
    bar("bound", bound_us, "bound", "No schedule of these collectives is faster"),
  );
}

// The same of the whole step: of all graphs that run.
function predictedStep(compile) {
  const known = compile.executed.filter((graph) => graph.prediction);
  if (known.length < 2) return null;
  const sum = (key) => known.reduce((total, graph) => total + graph.prediction[key], 0);
  const [total_us, possible_us, bound_us] = ["total_us", "possible_us", "bound_us"].map(sum);
  const names = known.map((graph) => graph.name).join(" and ");
  const over = total_us > bound_us ? ((total_us - bound_us) / total_us) * 100 : 0;
  return el(
    "section",
    { class: "card" },
    el(
      "header",
      {},
      el("h2", {}, "The step"),
      el(
        "span",
        { class: "muted" },
        `${names}; at most ${over.toFixed(1)} % can be saved by another order`,
      ),
    ),
    predicted({ total_us, possible_us, bound_us, limit_bytes: 0 }),
  );
}
