// A virtual list: only visible rows exist as elements. Arrow, page, Home and End keys move the
// active row, Enter selects it.

let listCount = 0;

function rowList({ label, height = 22, row, pick, role = "listbox" }) {
  const key = `list${listCount++}`;
  const space = el("div", { class: "rows-space", role: "presentation" });
  const element = el("div", { class: "rows", tabindex: 0, role, "aria-label": label }, space);
  let count = 0,
    active = -1,
    frame = 0,
    drawn = new Map();

  function draw() {
    frame = 0;
    const from = Math.max(0, Math.floor(element.scrollTop / height) - 8);
    const to = Math.min(count, Math.ceil((element.scrollTop + element.clientHeight) / height) + 8);
    const next = new Map();
    for (let at = from; at < to; at++) {
      let item = drawn.get(at);
      if (!item) {
        item = row(at);
        item.classList.add("row");
        item.id = `${key}-${at}`;
        item.setAttribute("role", role === "listbox" ? "option" : "row");
        item.setAttribute("aria-posinset", at + 1);
        item.setAttribute("aria-setsize", count);
        item.style.top = `${at * height}px`;
        item.style.height = `${height}px`;
        item.addEventListener("click", () => {
          active = at;
          pick(at);
          mark();
        });
        space.append(item);
      }
      next.set(at, item);
    }
    for (const [at, item] of drawn) if (!next.has(at)) item.remove();
    drawn = next;
    mark();
  }

  function mark() {
    for (const [at, item] of drawn) {
      item.classList.toggle("active", at === active);
      item.setAttribute("aria-selected", at === active);
    }
    if (drawn.has(active)) element.setAttribute("aria-activedescendant", `${key}-${active}`);
    else element.removeAttribute("aria-activedescendant");
  }

  function later() {
    if (!frame) frame = requestAnimationFrame(draw);
  }

  function reveal(at, middle) {
    const top = at * height,
      page = element.clientHeight;
    if (middle) element.scrollTop = top - page / 2;
    else if (top < element.scrollTop) element.scrollTop = top;
    else if (top + height > element.scrollTop + page) element.scrollTop = top + height - page;
    later();
  }

  element.addEventListener("scroll", later);
  element.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(element.clientHeight / height) - 1);
    const steps = {
      ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -count, End: count,
    };
    if (event.key in steps && !event.altKey && !event.ctrlKey && !event.metaKey) {
      active = Math.min(count - 1, Math.max(0, active + steps[event.key]));
      reveal(active);
      event.preventDefault();
    } else if (event.key === "Enter" && active >= 0) {
      pick(active);
      event.preventDefault();
    }
  });
  new ResizeObserver(later).observe(element);

  return {
    element,
    // Sets the number of rows and the active row. The list scrolls to the active row, if any.
    fill(rows, at = -1) {
      count = rows;
      active = at;
      for (const item of drawn.values()) item.remove();
      drawn = new Map();
      space.style.height = `${count * height}px`;
      if (at >= 0) requestAnimationFrame(() => reveal(at, true));
      draw();
    },
    get active() {
      return active;
    },
  };
}

// A list whose rows may be folds, which a click opens and closes. `rowsNow` returns the rows, `row`
// an element for one of them, and `isShown` says which one is the selected node's.
function foldingList({ label, role, height, rowsNow, foldedRow, row, pick, isShown }) {
  let shown = [];
  const list = rowList({
    label,
    role,
    height,
    row: (at) => (shown[at].fold ? foldedRow(shown[at]) : row(shown[at])),
    pick: (at) => {
      if (shown[at].fold) toggleFold(shown[at]);
      else if (shown[at].gap) openGaps.add(shown[at].key);
      else return pick(shown[at]);
      return fill(at);
    },
  });
  const fill = (active) => {
    shown = rowsNow();
    const at = active ?? shown.findIndex((each) => !each.fold && !each.gap && isShown(each));
    list.fill(shown.length, at);
  };
  return { list, element: list.element, fill, rows: () => shown };
}

const isChosen = (node) => node.id === state.node;
const itemsOf = (block) => block.items;

// A list of nodes, of which `nodesNow` returns those that are shown.
function nodeList(graph, label, nodesNow) {
  return foldingList({
    label,
    rowsNow: nodesNow,
    foldedRow: (row) => foldRow(row, itemsOf),
    row: (node) => listingRow(graph, node),
    pick: (node) => go({ node: node.id }),
    isShown: isChosen,
  });
}

// A line of a listing, split into parts that the style sheet colors. `change` stands after the name,
// because the end of a long line is cut.
function codeParts(node, change = "") {
  const { code } = node,
    split = code.indexOf(" = ");
  let parts = [code];
  if (node.op === "placeholder") {
    const [name] = code.split(": ", 1);
    parts = [el("b", {}, name), el("i", {}, code.slice(name.length))];
  } else if (split > 0) {
    const open = code.indexOf("(", split);
    const end = open < 0 ? code.length : open;
    const kind = node.collective || node.waits ? "op communicates" : "op";
    const op = span(kind, code.slice(split + 3, end));
    parts = [el("b", {}, code.slice(0, split)), " = ", op, code.slice(end)];
  }
  if (node.note) parts.push(span("note", `  # ${node.note}`));
  if (change) parts.splice(1, 0, " ", span("chip retagged", change));
  return span("text", parts);
}
