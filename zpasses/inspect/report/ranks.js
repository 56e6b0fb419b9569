// Which ranks of the dump run the same collectives.

function ranksCard() {
  const found = report.agreement || [];
  if (!found.length) return null;
  const differs = found.filter((each) => !each.agree);
  return el(
    "section",
    { class: differs.length ? "failure" : "card", role: differs.length ? "alert" : null },
    el(
      "header",
      {},
      el("h2", {}, differs.length ? "Ranks run different collectives" : "Ranks"),
      !differs.length &&
        el(
          "span",
          { class: "muted" },
          `all ${report.ranks.length} run the same collectives in ${found
            .map((each) => each.graph)
            .join(", ")}`,
        ),
    ),
    differs.map((each) => [
      el(
        "p",
        {},
        el("b", {}, `${each.compile} ${each.graph}: `),
        each.alike.map(rankNames).join("; "),
        each.missing.length ? `; missing on ${someOf(each.missing.map(String), 8)}` : "",
      ),
      each.difference
        .split(/ (?=Only on rank |Shown by: )/)
        .filter(Boolean)
        .map((part) => el("p", {}, part)),
      rankPair(each) &&
        button("Compare these ranks", () => compareRanks(each.graph, rankPair(each)), {
          class: "link",
        }),
    ]),
  );
}

// The compiles on this page of a rank of the first set and of one of the second, or null.
function rankPair({ compile, graph, alike }) {
  const found = alike
    .slice(0, 2)
    .map((ranks) =>
      compiles.find(
        (each) =>
          each.name === compile &&
          ranks.includes(each.rank) &&
          each.graphs.some((data) => data.name === graph),
      ),
    );
  return found.length === 2 && found.every(Boolean) ? found : null;
}

function compareRanks(graph, [one, other]) {
  const data = other.graphData(graph);
  const at = `${compiles.indexOf(other)}/${graph}/${other.last(data)}`;
  state.view = { ...state.view, with: at, other: "", swap: "" };
  go({
    compile: compiles.indexOf(one),
    graph,
    step: one.last(one.graphData(graph)),
    tab: "compare",
    node: null,
  });
}

function rankNames(ranks) {
  return `${ranks.length > 1 ? "ranks" : "rank"} ${someOf(ranks.map(String), 8)}`;
}
