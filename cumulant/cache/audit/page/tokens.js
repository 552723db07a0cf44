// The compressed part of a text: what is still held, and what was looked at and is gone.

function startTokens() {
  const texts = DATA.texts.map((text, index) => [index, `${text.kind}: ${text.name}`]);
  if (!texts.length) return;
  find("text-controls").append(
    selector("Text", "choose-text", texts, 0, (index) => set({ text: Number(index) })),
    choice("Colour", [["lost", "Lost attention"], ["attention", "All attention"]], state.colour, (colour) => set({ colour })),
  );
  const ramp = html("span", { class: "key" });
  find("text-controls").append(ramp);
  const said = html("p", { class: "aside" });
  const box = html("div", { class: "reading lost", tabindex: 0 });
  find("reading").append(html("div", { class: "sheet" }, box, said));
  const draw = () => {
    const text = DATA.texts[state.text];
    const { held, lost, share } = text.methods[state.row];
    const values = state.colour === "lost" ? lost : text.attention;
    // the first token draws more attention than all others: the scale is that of the bulk
    const top = Math.max(sorted(values)[Math.floor(0.98 * (values.length - 1))], 1);
    const colours = [themed("surface"), themed("warm")];
    box.replaceChildren(
      ...text.tokens.map((token, i) => {
        const part = clamp(values[i] / top, 0, 1) ** 0.6;
        const ground = between(colours, 0.75 * part);
        const ink = part > 0.03 ? inkOn(ground) : "inherit";
        const style = `background:${part > 0.03 ? css(ground) : "none"};color:${ink};opacity:${(0.25 + 0.75 * (held[i] / 100)).toFixed(2)}`;
        const span = html("span", { style: part > 0.25 ? style.replace(/opacity:[\d.]+/, "opacity:1") : style }, token);
        return hint(span, () => `token ${i}\nheld by ${held[i]} % of key heads\nattention ${show(text.attention[i] / 10, 3)}, lost ${show(lost[i] / 10, 3)} (100: the token with most)`);
      }),
    );
    said.textContent = `${percent(share, 2)} of the attention that later tokens paid to this part was on tokens that the head does not hold.`;
    ramp.textContent = state.colour === "lost" ? "colour: attention that is lost" : "colour: attention with the full cache";
  };
  watch(["row", "text", "colour", "theme"], draw);
  draw();
}
