// The eigenvalues of the covariance of hidden states, block by block.

const SPECTRA = {
  share: {
    label: "Share of the whole",
    of: (values) => {
      const sum = values.reduce((a, b) => a + b, 0) || 1;
      return values.map((v) => v / sum);
    },
  },
  value: { label: "Eigenvalue", of: (values) => values },
  sum: {
    label: "Running sum",
    of: (values) => {
      const whole = values.reduce((a, b) => a + b, 0) || 1;
      let sum = 0;
      return values.map((v) => (sum += v) / whole);
    },
  },
};

function spectralCurves() {
  const positive = (values) => (values ?? []).filter((v) => known(v) && v > 0).sort((a, b) => b - a);
  return DATA.spectra
    .map(({ block, eigenvalues }) => ({ block, values: SPECTRA[state.spectrum].of(positive(eigenvalues)) }))
    .filter(({ values }) => values.length);
}

const depthShade = (index, count) => css(between(VIRIDIS, 0.92 * (count > 1 ? index / (count - 1) : 0.4)));

function drawSpectra(width) {
  const curves = spectralCurves();
  if (!curves.length) return "No spectrum was recorded.";
  const all = curves.flatMap(({ values }) => values);
  const top = Math.max(...all);
  const bulk = all.filter((v) => v > top * 1e-8); // below lies rounding
  const { svg, x, y } = frame({
    width,
    height: clamp(width * 0.42, 260, 400),
    x: { low: 1, high: Math.max(2, ...curves.map(({ values }) => values.length)), log: true },
    y: state.spectrum === "sum" ? { low: 0, high: 1 } : padded(bulk, { log: true, share: 0.02 }),
    xLabel: "rank of the eigenvalue",
  });
  const drawn = curves.map(({ block, values }, index) => {
    const chosen = state.block === String(block);
    const points = values.map((v, i) => [x(i + 1), v]).filter(([, v]) => v >= y.low);
    const pixels = points.map(([at, v]) => [at, y(v)]);
    const colour = depthShade(index, curves.length);
    const faint = state.block !== null && !chosen ? 0.25 : 1;
    const style = `fill:none;stroke:${colour};stroke-width:${chosen ? 3 : 1.7};stroke-opacity:${faint}`;
    const curve =
      pixels.length > 1
        ? shape("path", { d: path(pixels), style, "data-block": block })
        : mark("circle", ...pixels[0], 4, { style: `fill:${colour};fill-opacity:${faint}` });
    return {
      chosen,
      curve: hint(curve, () => `block ${block}\n${values.length} eigenvalues\nlargest ${show(values[0])}`),
    };
  });
  svg.append(...drawn.sort((a, b) => a.chosen - b.chosen).map(({ curve }) => curve));
  return svg;
}

function startSpectra() {
  if (!DATA.spectra.length) {
    find("spectra-figure").append(nothing("No spectrum was recorded."));
    return;
  }
  const blocks = [["", "all blocks"], ...DATA.spectra.map(({ block }) => [String(block), `block ${block}`])];
  const shades = Array.from({ length: 5 }, (_, i) => css(between(VIRIDIS, 0.23 * i)));
  find("spectra-controls").append(
    choice(
      "Scale of the spectrum",
      Object.entries(SPECTRA).map(([key, { label }]) => [key, label]),
      state.spectrum,
      (spectrum) => set({ spectrum }),
    ),
    selector("Highlight", "block", blocks, "", (block) => set({ block: block || null })),
    html(
      "span",
      { class: "key" },
      "first block",
      html("i", { class: "ramp", style: `background:linear-gradient(90deg,${shades})` }),
      "last",
    ),
  );
  find("spectra-figure").append(
    figure({
      title: () => `Spectrum of the hidden states, ${SPECTRA[state.spectrum].label.toLowerCase()}`,
      name: "spectra",
      on: ["spectrum", "block"],
      draw: drawSpectra,
    }),
  );
}
