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
}

function trouble(message) {
  find("trouble").textContent = `Some figures could not be drawn: ${message}. A browser from 2023 or later is needed.`;
  find("trouble").hidden = false;
}

// what is chosen first: the method with the least KL at the largest budget that holds less than all
function firstRow() {
  const smaller = DATA.rows.filter((row) => row.asked < 1);
  const keep = Math.max(...(smaller.length ? smaller : DATA.rows).map((row) => row.asked));
  const best = DATA.rows.filter((row) => row.asked === keep).reduce((a, b) => (b.kl[0] < a.kl[0] ? b : a));
  return DATA.rows.indexOf(best);
}

async function begin() {
  addEventListener("error", (event) => trouble(event.message));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") find("hint").hidden = true;
  });
  startTheme();
  startMenu();
  try {
    DATA = await readData();
    Object.assign(state, { row: firstRow(), quantity: "damage", text: 0, colour: "lost" });
    for (const part of [startChooser, startCompare, startHeads, startTokens, startWorst]) part();
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    trouble(error.message);
    throw error;
  }
}

begin();
