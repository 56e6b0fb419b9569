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
    ]),
  );
}

function rankNames(ranks) {
  return `${ranks.length > 1 ? "ranks" : "rank"} ${someOf(ranks.map(String), 8)}`;
}
