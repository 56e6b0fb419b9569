// Which ranks of the dump run the same collectives.

function ranksCard() {
  const found = report.agreement || [];
  if (!found.length) return null;
  const differs = found.filter((each) => !each.agree);
  if (differs.length)
    return el(
      "section",
      { class: "failure", role: "alert" },
      el("h2", {}, "Ranks run different collectives"),
      differs.map(differingRanks),
    );
  const graphs = found.map((each) => each.graph).join(", ");
  const text = `all ${report.ranks.length} run the same collectives in ${graphs}`;
  return card("Ranks", "", muted(text));
}

function differingRanks(each) {
  const names = (ranks) => `${ranks.length > 1 ? "ranks" : "rank"} ${someOf(ranks.map(String), 8)}`;
  const missing = each.missing.length && `; missing on ${someOf(each.missing.map(String), 8)}`;
  const parts = each.difference.split(/ (?=Only on rank |Shown by: )/).filter(Boolean);
  const pair = rankPair(each);
  const title = el("b", {}, `${each.compile} ${each.graph}: `);
  return [
    el("p", {}, title, each.alike.map(names).join("; "), missing || ""),
    parts.map((part) => el("p", {}, part)),
    pair && linkButton("Compare these ranks", () => compareRanks(each.graph, pair)),
  ];
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
  const last = (compile) => compile.last(compile.graphData(graph));
  const shown = { compile: compiles.indexOf(one), graph, step: last(one) };
  compareWith(`${compiles.indexOf(other)}/${graph}/${last(other)}`, shown);
}
