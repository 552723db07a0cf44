// Texts whose tokens are coloured by what the chosen head did there.

const tokenKey = (values, head) =>
  [`${head.layer}.${head.head}`, `${head.layer},${head.head}`].find((key) => key in (values ?? {}));

function readings(text) {
  return Object.keys(text?.values ?? {});
}

function coloured(text, own, range, ramp, quantity) {
  const span = range && range.high > range.low ? range.high - range.low : 0;
  const apart = !text.tokens.some((token) => /^\s|\s$/.test(token)); // tokens without their spaces
  return text.tokens.flatMap((token, index) => {
    const value = own[index];
    const inside = apart && token.length > 2 && token.startsWith("##");
    const visible = inside ? token.slice(2) : token;
    const gap = apart && !inside && index ? " " : "";
    if (!known(value)) return [gap, html("span", { class: "unknown" }, visible)];
    const colour = ramp(span ? (value - range.low) / span : 0.5);
    const element = html("span", { style: `background:${css(colour)};color:${inkOn(colour)}` }, visible);
    element.dataset.at = index;
    const words = () => {
      const own = `${tokenName(token)}\nposition ${index}\n${labelOf(quantity)} ${show(value)}`;
      return [own, ...looksOf(text, index).map(([key, share]) => `→ ${nameOf(text, key)} ${share} %`)].join("\n");
    };
    return [gap, hint(element, words)];
  });
}

// under the pointer, or by the arrow keys, a token shows which tokens it looks at
function lookAround(reading, text) {
  const elements = new Map([...reading.querySelectorAll("[data-at]")].map((e) => [Number(e.dataset.at), e]));
  const order = [...elements.values()];
  const clear = () => elements.forEach((e) => e.style.removeProperty("outline"));
  const outline = (index) => {
    clear();
    for (const [key, share] of looksOf(text, index)) {
      const target = elements.get(key);
      if (target) target.style.outline = `${1 + Math.round(share / 25)}px solid var(--accent)`;
    }
  };
  order[0]?.setAttribute("tabindex", 0);
  reading.addEventListener("pointerover", (event) => {
    const { at } = event.target.dataset;
    if (at !== undefined) outline(Number(at));
  });
  reading.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && clear());
  reading.addEventListener("focusin", (event) => outline(Number(event.target.dataset.at)));
  reading.addEventListener("focusout", clear);
  reading.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const next = step && order[order.indexOf(event.target) + step];
    if (!next) return;
    event.preventDefault();
    event.target.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  });
}

function rampKey(range, ramp, quantity) {
  if (!range) {
    const elsewhere = DATA.texts.some((text) => text.values?.[quantity] && tokenKey(text.values[quantity], state.head));
    const words = elsewhere ? "This head does not read this text; it reads another of the list." : "Nothing was recorded of this head for this text.";
    return html("span", { class: "key" }, words);
  }
  const shades = `background:linear-gradient(90deg,${css(ramp(0))},${css(ramp(1))})`;
  const parts = [show(range.low, 3), html("i", { class: "ramp", style: shades })];
  const words = [show(range.high, 3), withUnit(quantity)].map((text) => html("span", {}, text));
  return html("span", { class: "key" }, parts, words);
}

function showReading(panel) {
  const text = DATA.texts[state.text];
  const quantity = readings(text).includes(state.colouring) ? state.colouring : readings(text)[0];
  const rows = text.values?.[quantity];
  const own = rows?.[tokenKey(rows, state.head)] ?? [];
  const range = extent(own);
  const ramp = tint();
  const more = text.length - text.tokens.length;
  const table = () => text.tokens.map((token, index) => [index, token, own[index] ?? null]);
  const button = saveButton("CSV", () => saveTable("text", ["position", "token", quantity], table()));
  const heading = html("h3", {}, `${text.name ?? "Text"}, ${headName(state.head).toLowerCase()}`);
  const tokens = coloured(text, own, range, ramp, quantity);
  const cut = more > 0 ? html("small", {}, ` … ${show(more)} more tokens`) : null;
  panel.replaceChildren(
    html("header", {}, heading, html("span", { class: "tools" }, button)),
    rampKey(range, ramp, quantity),
    html("p", { class: "reading", dir: "auto" }, tokens, cut),
  );
  lookAround(panel.querySelector(".reading"), text);
}

const isReadBy = (text, head) => readings(text).some((name) => tokenKey(text.values[name], head));

// encoder and decoder read different texts: when a head is chosen, one that it reads is shown
function showTextOfHead() {
  if (isReadBy(DATA.texts[state.text], state.head)) return;
  const text = DATA.texts.findIndex((other) => isReadBy(other, state.head));
  if (text < 0) return;
  if (find("text")) find("text").value = String(text);
  set({ text });
}

function startTexts() {
  if (!DATA.texts.length || !state.head) {
    find("reading").append(nothing("This record has no excerpts."));
    return;
  }
  const panel = html("div", { class: "sheet", "data-sheet": "text" });
  const names = DATA.texts.map((text, index) => [String(index), text.name ?? `Text ${index + 1}`]);
  const kinds = [...new Set(DATA.texts.flatMap(readings))];
  state.colouring = kinds[0];
  const controls = find("text-controls");
  if (names.length > 1) controls.append(selector("Text", "text", names, "0", (text) => set({ text: Number(text) })));
  if (kinds.length > 1) {
    controls.append(
      choice(
        "Colour",
        kinds.map((name) => [name, capital(labelOf(name)), definitionOf(name)]),
        state.colouring,
        (colouring) => set({ colouring }),
      ),
    );
  }
  find("reading").append(panel);
  showReading(panel);
  watch(["text", "colouring", "head", "theme"], () => showReading(panel));
  watch(["head"], showTextOfHead);
  showTextOfHead();
}
