// Draws the page.

const dark = matchMedia("(prefers-color-scheme: dark)");

function startTheme() {
  const root = document.documentElement;
  find("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    set({ theme: root.dataset.theme });
  });
  dark.addEventListener("change", () => set({ theme: `system ${dark.matches}` }));
}

// on a narrow screen the sections are behind a button
function startMenu() {
  const [button, list] = [find("menu"), find("sections")];
  const open = (wanted) => {
    button.setAttribute("aria-expanded", String(wanted));
    list.classList.toggle("open", wanted);
  };
  button.addEventListener("click", () => open(button.getAttribute("aria-expanded") !== "true"));
  list.addEventListener("click", () => open(false));
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !list.classList.contains("open")) return;
    open(false);
    button.focus();
  });
}

function startCopy() {
  find("copy")?.addEventListener("click", () => {
    const range = document.createRange();
    range.selectNodeContents(find("command"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    const done = () => {
      find("copy").textContent = "Copied";
    };
    navigator.clipboard?.writeText(find("command").textContent).then(done, () => {
      find("copy").textContent = "Selected";
    });
  });
}

function trouble(message) {
  find("trouble").textContent = `Some figures could not be drawn: ${message}. A browser from 2023 or later is needed.`;
  find("trouble").hidden = false;
}

async function start() {
  addEventListener("error", (event) => trouble(event.message));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") find("hint").hidden = true;
  });
  startTheme();
  startMenu();
  startCopy();
  try {
    prepare(await unpacked());
    for (const part of [startSteps, startMap, startHead, startTexts, startDepth, startStates, startSpectra, startTable, startRemarkable, startCauses]) part();
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    trouble(error.message);
    throw error;
  }
}

start();
