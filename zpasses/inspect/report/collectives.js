// A table of all collectives that sorts and filters. A click on a row selects its node.

const COLUMNS = [
  {
    key: "number",
    title: "Order in which they start",
    name: "#",
    right: true,
    value: (each) => each.number,
    text: (each) => each.number + 1,
  },
  {
    key: "node",
    title: "The node that starts it",
    name: "node",
    value: (each) => each.node.name,
    text: (each) => middleCut(each.node.name),
  },
  {
    key: "kind",
    title: "What it does",
    name: "kind",
    value: (each) => each.node.collective.kind,
    text: (each) => each.node.collective.kind.replace(/_into_tensor|_tensor|_coalesced/g, ""),
  },
  {
    key: "group",
    title: "Process group, and its number of ranks",
    name: "group",
    value: (each) => each.node.collective.group,
    text: (each) =>
      /^\d+$/.test(each.node.collective.group)
        ? `${each.node.collective.group} (${each.node.collective.ranks})`
        : el("span", { title: groupTitle(each) }, each.node.collective.group),
  },
  {
    key: "params",
    title: "Parameters that it carries; without any, the module of the line that calls it",
    name: "parameters",
    value: (each) => each.node.params[0] || moduleOfLine(each.node),
    text: (each) =>
      each.node.params.length > 1
        ? [
            paramCut(each.node.params[0]),
            el("span", { class: "more" }, `\u00a0+${each.node.params.length - 1}`),
          ]
        : each.node.params[0]
          ? paramCut(each.node.params[0])
          : el("span", { class: "muted" }, paramCut(moduleOfLine(each.node))),
  },
  {
    key: "bytes",
    title: "Bytes of this rank's input",
    name: "bytes",
    right: true,
    value: (each) => each.node.collective.nbytes,
    text: (each) => bytesText(each.node.collective.nbytes),
  },
  {
    key: "distance",
    title: "Nodes between its start and its first wait",
    name: "distance",
    right: true,
    value: (each) => each.distance,
    text: (each) => countText(each.distance),
  },
  {
    key: "compute",
    title: "Compute time between its start and its first wait",
    name: "compute between",
    right: true,
    value: (each) => each.compute,
    text: (each) => timeText(each.compute),
  },
  {
    key: "time",
    title: "Time of the transfer, by the target's model",
    name: "time",
    right: true,
    value: (each) => each.time,
    text: (each) => timeText(each.time),
  },
  {
    key: "exposed",
    title: "Time for which compute waits for it",
    name: "exposed",
    right: true,
    value: (each) => each.exposed,
    text: (each) => timeText(each.exposed),
  },
  {
    key: "queued",
    title: "Part of the exposed time before its transfer starts, behind earlier collectives of its group",
    name: "queueing",
    right: true,
    optional: "76px",
    value: (each) => each.queued,
    text: (each) => timeText(each.queued),
  },
  {
    key: "measured",
    title: "Measured time from its launch until its data are in place, on average",
    name: "measured",
    right: true,
    optional: "76px",
    value: (each) => (each.measured ? each.measured[0] : 0),
    text: (each) => (each.measured ? timeText(each.measured[0]) : ""),
  },
  {
    key: "waited",
    title: "Measured time for which compute stands still for it, on average",
    name: "its exposed",
    right: true,
    optional: "76px",
    value: (each) => (each.measured ? each.measured[1] : 0),
    text: (each) => (each.measured ? timeText(each.measured[1]) : ""),
  },
  {
    key: "route",
    optional: "76px",
    title: "The implementation that a pass chose",
    name: "route",
    value: (each) => each.node.collective.route,
    text: (each) => each.node.collective.route,
  },
  {
    key: "decision",
    optional: "minmax(110px, 1fr)",
    title: "The pass's reason",
    name: "decision",
    value: (each) => each.node.collective.decision,
    text: (each) => each.node.collective.decision,
  },
];

// Whether a column of routes would repeat one word, and take the room of the parameters' names.
function isOneRoute(all) {
  return all.every((each) => each.node.collective.route === all[0].node.collective.route);
}

// Columns that make room for measured times. The panel of the node shows them too.
const YIELDS = ["distance", "route"];

// A collective of the model itself, as of tensor parallelism, carries no parameter.
function moduleOfLine(node) {
  return (node.source && node.source.module) || "";
}

function groupTitle(each) {
  return `${each.node.collective.group} (${each.node.collective.ranks})`;
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
  let shown = [],
    matching = [],
    matchedFor = null;
  const list = rowList({
    label: "Collectives",
    role: "grid",
    height: 28,
    row: (at) =>
      shown[at].fold ? collectiveFold(columns, shown[at]) : collectiveRow(columns, shown[at]),
    pick: (at) => {
      if (!shown[at].fold) return go({ node: shown[at].id });
      toggleFold(shown[at]);
      return fill(at);
    },
  });
  const count = el("span", { class: "muted", role: "status" });
  const none = el("p", { class: "muted pad", role: "status", hidden: true });
  const head = el("div", { class: "grid-head", style: extraColumns(columns), role: "row" });
  const folds = () => state.view.fold === "yes";
  // Shows the rows. A fold that opens or closes needs no new selection, order or heading.
  const fill = (active) => {
    const { filter = "", kind = "", exposed = "" } = state.view;
    const { key, down } = sorting();
    const column = columns.find((each) => each.key === key) || columns[0];
    const asked = JSON.stringify([filter, kind, exposed, key, down]);
    if (asked !== matchedFor) select(filter, kind, exposed, column, down);
    matchedFor = asked;
    shown = folds() ? foldCollectives(matching, column, down) : matching;
    list.fill(
      shown.length,
      active ?? shown.findIndex((each) => !each.fold && each.id === state.node),
    );
    // A scroll bar narrows the rows, so the header is narrowed by the same amount.
    requestAnimationFrame(() => {
      head.style.paddingRight = `${14 + list.element.offsetWidth - list.element.clientWidth}px`;
    });
  };
  const select = (filter, kind, exposed, column, down) => {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    matching = all.filter(
      (each) =>
        words.every((word) => matches(each.node, word)) &&
        (!kind || each.node.collective.kind === kind) &&
        (!exposed || each.exposed > 0),
    );
    matching.sort((a, b) => {
      const one = column.value(a),
        other = column.value(b);
      return (
        (down ? -1 : 1) *
          (typeof one === "string"
            ? one.localeCompare(other, "en", { numeric: true })
            : one - other) || a.number - b.number
      );
    });
    none.hidden = matching.length > 0;
    clear(
      none,
      kind && !kinds.includes(kind)
        ? `This graph has no collective of the kind "${kind}". Its kinds are ${kinds.join(", ")}.`
        : words.length
          ? nothingMatches("collective")
          : `No collective${kind && ` of the kind "${kind}"`} is exposed: compute waits for none.`,
    );
    const sum = (pick) => matching.reduce((total, each) => total + pick(each), 0);
    clear(
      count,
      matching.length === all.length ? "" : `${countText(matching.length)} of `,
      `${plural(all.length, "collective")}`,
      groups.size === 1 && ` of group ${groupTitle(all[0])}`,
      " · ",
      `${bytesText(sum((each) => each.node.collective.nbytes))} of input · `,
      `${timeText(sum((each) => each.time))} · `,
      el("b", { class: "exposed-text" }, `${timeText(sum((each) => each.exposed))} exposed`),
    );
    clear(
      head,
      columns.map((each) => sortButton(each, () => fill())),
    );
  };
  const kinds = [...new Set(all.map((each) => each.node.collective.kind))];
  const groups = new Set(all.map((each) => each.node.collective.group));
  put(
    main,
    el(
      "div",
      { class: "bar" },
      filterField("Filter by node, op, parameter or module", () => fill()),
      el(
        "select",
        {
          "aria-label": "Kind of collective",
          onchange: (event) => {
            keep({ kind: event.target.value });
            fill();
          },
        },
        el("option", { value: "" }, "all kinds"),
        kinds.map((kind) =>
          el("option", { value: kind, selected: kind === state.view.kind }, kind),
        ),
        state.view.kind &&
          !kinds.includes(state.view.kind) &&
          el("option", { value: state.view.kind, selected: true }, `${state.view.kind} (none)`),
      ),
      el(
        "label",
        {},
        el("input", {
          type: "checkbox",
          checked: Boolean(state.view.exposed),
          onchange: (event) => {
            keep({ exposed: event.target.checked ? "1" : "" });
            fill();
          },
        }),
        " exposed only",
      ),
      foldSwitch(folds() ? FOLDS_FROM : 0, () => fill()),
      count,
    ),
    el(
      "div",
      { class: groups.size > 1 ? "grid" : "grid one-group", style: leastWidth(columns) },
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

// Below this width, the table scrolls.
function leastWidth(columns) {
  return { "--extras": columns.filter((column) => column.optional).length };
}

function sortButton(column, fill) {
  const { key, down } = sorting(),
    active = key === column.key;
  return el(
    "span",
    {
      role: "columnheader",
      class: `${column.right ? "right" : ""} col-${column.key}`,
      title: column.title,
      "aria-sort": active ? (down ? "descending" : "ascending") : "none",
    },
    button(`${column.name}${active ? (down ? " ↓" : " ↑") : ""}`, (event) => {
      // Numbers sort from the largest down at first.
      const descends = active ? !down : Boolean(column.right) && column.key !== "number";
      keep({ sort: column.key, down: descends ? "1" : "" });
      fill();
      [...document.querySelectorAll(".grid-head button")][
        COLUMNS.findIndex((each) => each.key === column.key)
      ]?.focus();
    }),
  );
}

function collectiveRow(columns, each) {
  return el(
    "div",
    {
      class: "grid-row",
      style: extraColumns(columns),
      title: [each.node.name, ...each.node.params, !each.node.params.length && moduleOfLine(each.node)]
        .filter(Boolean)
        .join("\n"),
    },
    columns.map((column) =>
      el(
        "span",
        {
          role: "gridcell",
          class: [
            column.right ? "right" : "",
            `col-${column.key}`,
            column.key === "exposed" && each.exposed ? "exposed-text" : "",
          ].join(" "),
          style:
            column.key === "exposed" && each.time
              ? { "--share": `${100 * Math.min(1, each.exposed / each.time)}%` }
              : {},
        },
        column.text(each),
      ),
    ),
  );
}
