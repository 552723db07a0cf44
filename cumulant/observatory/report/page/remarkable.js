// Links to a head: from the list of those that stand out, and from the address of the page, #L5H3.

const headAt = (layer, head) => DATA.heads.find((h) => h.layer === layer && h.head === head);

function headNamed(short) {
  const [, layer, head] = /^L(\d+)H(\d+)$/.exec(short) ?? [];
  return layer === undefined ? null : headAt(Number(layer), Number(head));
}

function choose(head, quantity) {
  set(DATA.measured.includes(quantity) ? { head, quantity } : { head });
  find("heads").scrollIntoView();
}

// figures are drawn after the first layout, and those above the heads push them down
function stayAt(section) {
  const observer = new ResizeObserver(() => section.scrollIntoView({ behavior: "instant" }));
  observer.observe(document.body);
  const stop = () => observer.disconnect();
  for (const name of ["wheel", "touchstart", "keydown", "pointerdown"]) addEventListener(name, stop, { once: true, passive: true });
  setTimeout(stop, 2000);
}

function startRemarkable() {
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-head]");
    const head = link && headAt(...link.dataset.head.split(".").map(Number));
    if (!head) return;
    event.preventDefault();
    if (head !== state.head) history.pushState(null, "", location.href); // to go back to
    choose(head, link.dataset.quantity);
  });
  const open = () => {
    const named = headNamed(location.hash.slice(1));
    if (!named) return false;
    choose(named, document.querySelector(`a[data-head="${named.layer}.${named.head}"]`)?.dataset.quantity);
    return true;
  };
  addEventListener("hashchange", open);
  if (open()) stayAt(find("heads"));
  // the address always names the head that is shown, to be copied
  const name = () => history.replaceState(null, "", `#${shortName(state.head)}`);
  watch(["head"], () => state.head && name());
}
