// Tokens whose prediction changed most.

const quoted = (token) => html("code", {}, token === "" ? "∅" : token.replaceAll("\n", "⏎"));

function predictions(title, list, right) {
  const items = list.map(([token, share]) => html("li", { class: token === right ? "right" : null }, quoted(token), html("span", {}, percent(share, 2))));
  return html("div", {}, html("h4", {}, title), html("ol", {}, items));
}

function looks(list) {
  const items = list.slice(0, 5).map(({ before, token, after, position, share }) =>
    html("li", {}, html("code", {}, before.replaceAll("\n", "⏎"), html("mark", {}, token.replaceAll("\n", "⏎")), after.replaceAll("\n", "⏎")), html("span", {}, `${percent(share, 2)} at ${position}`)),
  );
  return html("div", {}, html("h4", {}, "Lost tokens it looked at (share of all attention)"), html("ol", {}, items.length ? items : html("li", {}, "none")));
}

function startWorst() {
  const draw = () =>
    find("worst-tokens").replaceChildren(
      ...DATA.worst[state.row].map((worst) =>
        html(
          "article",
          { class: "card" },
          html("header", {}, html("b", {}, `${show(worst.kl, 3)} nats`), html("span", {}, `token ${worst.position} after the compressed part of ${worst.text}`)),
          html("p", { class: "quote" }, html("span", {}, `…${worst.before.join("")}`), html("span", { class: "here" }, worst.token)),
          html(
            "div",
            { class: "columns" },
            predictions("Next, with the full cache", worst.full, worst.next),
            predictions("Next, with the compressed one", worst.compressed, worst.next),
            looks(worst.lost),
          ),
          html("p", { class: "aside" }, "In the text: ", quoted(worst.next)),
        ),
      ),
    );
  watch(["row"], draw);
  draw();
}
