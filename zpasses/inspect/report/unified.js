// On a narrow page, the two sides of a difference stand below each other in one list: what is before
// a change above what is after it, and an equal node once.

const narrowPage = matchMedia("(max-width: 720px)");
narrowPage.addEventListener("change", () => {
  if (["diff", "compare"].includes(state.tab)) redraw();
});

// The rows as they are shown. On a narrow page, each row of two sides that differ becomes two, whose
// `side` says which of them it shows.
function shownRows(rows) {
  if (!narrowPage.matches) return rows;
  const shown = [];
  let after = [];
  const flush = () => {
    shown.push(...after);
    after = [];
  };
  for (const row of rows) {
    if (row.fold || row.gap || row.anchor) flush();
    if (row.fold || row.gap) shown.push(row);
    else if (row.anchor) {
      if (row.kinds.length) shown.push({ ...row, side: "before" });
      shown.push({ ...row, side: "after", equal: !row.kinds.length });
    } else {
      if (row.before) shown.push({ ...row, after: undefined, side: "before" });
      if (row.after) after.push({ ...row, before: undefined, side: "after" });
    }
  }
  flush();
  return shown;
}

// The two sides of a row, or the one that a narrow page shows. `cell` makes the cell of a side.
function pairRow(item, names, cell) {
  if (!item.side) return el("div", { class: "pair" }, cell("before"), cell("after"));
  const name = names[item.side === "before" ? 0 : 1];
  return el(
    "div",
    { class: "pair single" },
    el("span", { class: "side" }, item.equal ? "" : name),
    cell(item.side),
  );
}

// What stands above the columns, or what the names of the sides mean.
function sidesHead(titles, names) {
  return el(
    "div",
    { class: "diff-head" },
    titles.map((title, at) => {
      const named = title.startsWith(names[at]) || !narrowPage.matches;
      return el("span", {}, named ? title : `${names[at]}: ${title}`);
    }),
  );
}
