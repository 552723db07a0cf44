// Links to a head: from the list of those that stand out, and from the address of the page, #L5H3.

const headAt = (layer, head) => DATA.heads.find((h) => h.layer === layer && h.head === head);

function headOfAddress() {
  const [, layer, head] = /^#L(\d+)H(\d+)$/.exec(location.hash) ?? [];
  return layer === undefined ? null : headAt(Number(layer), Number(head));
}

function startRemarkable() {
  for (const link of document.querySelectorAll("a[data-head]")) {
    link.addEventListener("click", (event) => {
      const head = headAt(...link.dataset.head.split(".").map(Number));
      if (!head) return;
      event.preventDefault();
      history.replaceState(null, "", link.getAttribute("href"));
      const { quantity } = link.dataset;
      set(DATA.measured.includes(quantity) ? { head, quantity } : { head });
      find("heads").scrollIntoView();
    });
  }
  const named = headOfAddress();
  if (!named) return;
  set({ head: named });
  find("heads").scrollIntoView();
}
