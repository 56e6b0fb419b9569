// A table of all collectives that sorts and filters. A click on a row selects its node.

// Figures of a collective; `of` is what its node says about it. `optional` is the width of a column
// that only some graphs have.
const COLUMNS = [
  {
    key: "number",
    name: "#",
    title: "Order in which they start",
    right: true,
    value: (each) => each.number,
    text: (each) => each.number + 1,
  },
  {
    key: "node",
    title: "The node that starts it",
    value: (each) => each.node.name,
    text: (each) => middleCut(each.node.name),
  },
  {
    key: "kind",
    title: "What it does",
    value: ({ of }) => of.kind,
    text: ({ of }) => of.kind.replace(/_into_tensor|_tensor|_coalesced/g, ""),
  },
  {
    key: "group",
    title: "Process group, and its number of ranks",
    value: ({ of }) => of.group,
    text: (each) =>
      /^\d+$/.test(each.of.group)
        ? groupTitle(each)
        : el("span", { title: groupTitle(each) }, each.of.group),
  },
  {
    key: "params",
    name: "parameters",
    title: "Parameters that it carries; without any, the module of the line that calls it",
    value: ({ node }) => node.params[0] || moduleOfLine(node),
    text: ({ node: { params }, node }) =>
      params.length
        ? [paramCut(params[0]), params.length > 1 && span("more", `\u00a0+${params.length - 1}`)]
        : muted(paramCut(moduleOfLine(node))),
  },
  figureColumn("bytes", "Bytes of this rank's input", ({ of }) => of.nbytes, bytesText),
  figureColumn("distance", "Nodes between its start and its first wait", null, countText),
  {
    ...figureColumn("compute", "Compute time between its start and its first wait"),
    name: "compute between",
  },
  figureColumn("time", "Time of the transfer, by the target's model"),
  figureColumn("exposed", "Time for which compute waits for it"),
  {
    ...figureColumn(
      "queued",
      "Part of the exposed time before its transfer starts, behind earlier collectives",
    ),
    name: "queueing",
    optional: "76px",
  },
  measuredColumn("measured", 0, "Mean time from its launch until its data are in place"),
  {
    ...measuredColumn("waited", 1, "Mean measured time for which compute stands still for it"),
    name: "its exposed",
  },
  { ...textColumn("route", "The implementation that a pass chose"), optional: "76px" },
  { ...textColumn("decision", "The pass's reason"), optional: "minmax(110px, 1fr)" },
];

function figureColumn(key, title, given, text = timeText) {
  const value = given || ((each) => each[key]);
  return { key, title, right: true, value, text: (each) => text(value(each)) };
}

function measuredColumn(key, at, title) {
  const text = ({ measured }) => (measured ? timeText(measured[at]) : "");
  const value = ({ measured }) => (measured ? measured[at] : 0);
  return { key, title, right: true, optional: "76px", value, text };
}

function textColumn(key, title) {
  const text = ({ of }) => of[key];
  return { key, title, value: text, text };
}

// Whether a column of routes would repeat one word, and take the room of the parameters' names.
function isOneRoute(all) {
  return all.every((each) => each.of.route === all[0].of.route);
}

// Columns that make room for measured times. The panel of the node shows them too.
const YIELDS = ["distance", "route"];

// A collective of the model itself, as of tensor parallelism, carries no parameter.
function moduleOfLine(node) {
  return (node.source && node.source.module) || "";
}

function groupTitle(each) {
  return `${each.of.group} (${each.of.ranks})`;
}

// A parameter's name. Where it has little room, it starts at the number of its layer, which is never
// cut, since other layers have equal names after it; and it ends without ".weight", as most do.
function paramCut(name) {
  const [, before, number, rest] = /^((?:[^.]*\.)+?)(\d+\.)(.*)$/.exec(name) || [, "", "", name];
  const end = number && rest.endsWith(".weight") ? ".weight" : "";
  return el(
    "span",
    { class: "param", title: name },
    before && el("span", { class: "roomy" }, before),
    number && el("span", { class: "layer" }, el("span", { class: "scant" }, "…"), number),
    el("span", { class: "rest" }, middleCut(rest.slice(0, rest.length - end.length))),
    end && el("span", { class: "roomy" }, end),
  );
}

function sorting() {
  const { sort, down } = state.view;
  const known = COLUMNS.some((column) => column.key === sort);
  return { key: known ? sort : "number", down: known && down === "1" };
}

function drawCollectives(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  const all = graph.collectives;
  if (!isModelled(current.step)) return put(main, notModelled());
  if (!all.length)
    return put(main, el("p", { class: "muted pad" }, "This graph has no collectives."));
  const columns = COLUMNS.filter(
    (column) =>
      (!column.optional || all.some((each) => column.value(each))) &&
      !(current.step.measured && YIELDS.includes(column.key)) &&
      !(column.key === "route" && isOneRoute(all)),
  );
  let matching = [],
    matchedFor = null;
  const count = el("span", { class: "muted", role: "status" });
  const none = el("p", { class: "muted pad", role: "status", hidden: true });
  const head = el("div", { class: "grid-head", style: extraColumns(columns), role: "row" });
  const kinds = [...new Set(all.map((each) => each.of.kind))];
  const groups = new Set(all.map((each) => each.of.group));
  const folds = () => state.view.fold === "yes";
  // Shows the rows. A fold that opens or closes needs no new selection, order or heading.
  const rowsNow = () => {
    const { filter = "", kind = "", exposed = "" } = state.view;
    const { key, down } = sorting();
    const column = columns.find((each) => each.key === key) || columns[0];
    const asked = JSON.stringify([filter, kind, exposed, key, down]);
    if (asked !== matchedFor) select(kind, exposed, column, down);
    matchedFor = asked;
    // A scroll bar narrows the rows, so the header is narrowed by the same amount.
    requestAnimationFrame(() => {
      head.style.paddingRight = `${14 + list.element.offsetWidth - list.element.clientWidth}px`;
    });
    return folds() ? foldCollectives(matching, column, down) : matching;
  };
  const select = (kind, exposed, column, down) => {
    const words = filterWords();
    matching = all.filter(
      (each) =>
        words.every((word) => matches(each.node, word)) &&
        (!kind || each.of.kind === kind) &&
        (!exposed || each.exposed > 0),
    );
    const order = (one, other) =>
      typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
    const sign = down ? -1 : 1;
    matching.sort((a, b) => sign * order(column.value(a), column.value(b)) || a.number - b.number);
    none.hidden = matching.length > 0;
    clear(
      none,
      kind && !kinds.includes(kind)
        ? `This graph has no collective of the kind "${kind}". Its kinds are ${kinds.join(", ")}.`
        : words.length
          ? nothingMatches("collective")
          : `No collective${kind && ` of the kind "${kind}"`} is exposed: compute waits for none.`,
    );
    clear(
      count,
      matching.length === all.length ? "" : `${countText(matching.length)} of `,
      `${plural(all.length, "collective")}`,
      groups.size === 1 && ` of group ${groupTitle(all[0])}`,
      " · ",
      `${bytesText(sumOf(matching, (each) => each.of.nbytes))} of input · `,
      `${timeText(sumOf(matching, (each) => each.time))} · `,
      el("b", { class: "exposed-text" }, timeText(sumOf(matching, (each) => each.exposed)), " exposed"),
    );
    clear(head, columns.map((each) => sortButton(each, fill)));
  };
  const list = foldingList({
    label: "Collectives",
    role: "grid",
    height: 28,
    rowsNow,
    foldedRow: (row) => collectiveFold(columns, row),
    row: (each) => collectiveRow(columns, each),
    pick: (each) => go({ node: each.id }),
    isShown: isChosen,
  });
  const fill = () => list.fill();
  const keepAndFill = (changes) => {
    keep(changes);
    fill();
  };
  const lost = state.view.kind && !kinds.includes(state.view.kind);
  const options = [
    option("", false, "all kinds"),
    ...kinds.map((kind) => option(kind, kind === state.view.kind, kind)),
    lost && option(state.view.kind, true, `${state.view.kind} (none)`),
  ];
  const exposedOnly = (checked) => keepAndFill({ exposed: checked ? "1" : "" });
  put(
    main,
    bar(
      filterField("Filter by node, op, parameter or module", fill),
      choice("Kind of collective", options, (kind) => keepAndFill({ kind })),
      checkBox("exposed only", Boolean(state.view.exposed), exposedOnly),
      foldSwitch(folds() ? FOLDS_FROM : 0, fill),
      count,
    ),
    el(
      "div",
      {
        class: groups.size > 1 ? "grid" : "grid one-group",
        // Below this width, the table scrolls.
        style: { "--extras": columns.filter((column) => column.optional).length },
      },
      head,
      list.element,
    ),
    none,
  );
  fill();
}

// Widths of the columns that only some graphs have.
function extraColumns(columns) {
  return { "--extra": columns.map((column) => column.optional || "").join(" ") };
}

function sortButton({ key, name = key, title, right }, fill) {
  const sorted = sorting(),
    active = key === sorted.key;
  const sort = () => {
    // Numbers sort from the largest down at first.
    const descends = active ? !sorted.down : Boolean(right) && key !== "number";
    keep({ sort: key, down: descends ? "1" : "" });
    fill();
    document.querySelector(`.grid-head .col-${key} button`)?.focus();
  };
  const sense = sorted.down ? ["descending", " ↓"] : ["ascending", " ↑"];
  const [order, arrow] = active ? sense : ["none", ""];
  return el(
    "span",
    {
      role: "columnheader",
      class: `${right ? "right" : ""} col-${key}`,
      title,
      "aria-sort": order,
    },
    button(name + arrow, sort),
  );
}

// A row of the table. `text` returns the content of a column.
function gridRow(columns, text, isExposed, props, share) {
  const cells = columns.map((column) => {
    const exposed = column.key === "exposed" && isExposed;
    const side = `${column.right ? "right " : ""}${exposed ? "exposed-text " : ""}`;
    const style = column.key === "exposed" && share ? { "--share": share } : {};
    const name = `${side}col-${column.key}`;
    return el("span", { role: "gridcell", class: name, style }, text(column));
  });
  return el("div", { class: "grid-row", style: extraColumns(columns), ...props }, cells);
}

function collectiveRow(columns, each) {
  const { name, params } = each.node;
  const lines = [name, ...params, !params.length && moduleOfLine(each.node)].filter(Boolean);
  const share = each.time && `${100 * Math.min(1, each.exposed / each.time)}%`;
  const text = (column) => column.text(each);
  return gridRow(columns, text, each.exposed, { title: lines.join("\n") }, share);
}
