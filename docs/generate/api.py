"""docs/api/*.md: directives that put the docstring of every public name on the site.

A name is public if a public module lists it in ``__all__``, or, where a module has no such list, defines it without an
underscore. It stands once in the reference, under its shortest path.
"""

import importlib
import inspect
from types import ModuleType
from typing import NamedTuple

from docs.generate.write import markdown_table


class ApiPage(NamedTuple):
    """One page: its title, what it is about, and the modules whose names it has."""

    title: str
    words: str
    modules: tuple[str, ...]


PAGES = {
    "measures": ApiPage(
        "Measures", "What h is: G, its mean, its Fisher information, and the algebra of measures.", ("measures",)
    ),
    "attention": ApiPage(
        "Attention and moments", "Sums of exponentials over keys, and what follows from them.", ("attention", "kernels")
    ),
    "geometry": ApiPage("Geometry", "Divergences, dual coordinates, geodesics, maximum entropy.", ("geometry",)),
    "uses": ApiPage(
        "Uses of one function",
        "Residual steps, Hopfield networks, regression, potentials, duality, links, Boltzmann machines.",
        ("residual", "hopfield", "regression", "potentials", "duality", "link", "boltzmann"),
    ),
    "contrastive": ApiPage("Contrastive losses", "Fenchel–Young gaps of log-normalizers.", ("contrastive",)),
    "dynamics": ApiPage("Dynamics", "Layers applied again and again, and what is read off an ensemble.", ("dynamics",)),
    "filters": ApiPage(
        "Filters", "Switching state-space models, and `cumulant track` in Python.", ("filters", "filters.tracking")
    ),
    "families": ApiPage("Families", "Conjugate exponential families.", ("families",)),
    "samplers": ApiPage("Samplers", "Tempered sequential Monte Carlo, Gibbs, resampling, diagnostics.", ("samplers",)),
    "nn": ApiPage("Layers", "Modules to use in a model.", ("nn", "transformers")),
    "observatory": ApiPage(
        "Observatory", "Looking into transformers, and watching a training.", ("observatory", "observatory.monitor")
    ),
    "cache": ApiPage(
        "Caches as measures",
        "Keys, values and masses of every head, compressed, and how wrong that is.",
        ("cache", "cache.baselines", "cache.audit"),
    ),
    "solve": ApiPage("Solvers", "Fixed points and roots, sample by sample.", ("solve", "special", "testing")),
    "paper": ApiPage(
        "The paper as a program",
        "Statements, checks, experiments and trainings behind `cumulant verify`, `experiment` and `train`.",
        ("paper.statements", "paper.verify", "paper.experiments", "paper.trainings", "training"),
    ),
}


LONGEST_CALL = 110  # characters; further arguments are an ellipsis, and on the site


class PublicName(NamedTuple):
    """A public name: the path under which it is documented, and what it is."""

    path: str
    value: object

    @property
    def summary(self) -> str:
        """The first line of the docstring, for those who read the page without the site; of constants, their type."""
        documented = inspect.isclass(self.value) or inspect.isroutine(self.value)
        lines = (inspect.getdoc(self.value) or "").splitlines() if documented else []
        return lines[0] if lines else f"a constant: {type(self.value).__name__}"

    @property
    def call(self) -> str:
        """How it is called: the names of the arguments, with defaults where they are short."""
        name = self.path.removeprefix("cumulant.")
        if inspect.isclass(self.value) or not inspect.isroutine(self.value):
            return name
        words, length = [], len(name)
        for parameter in inspect.signature(self.value).parameters.values():
            words.append(_argument(parameter))
            length += len(words[-1]) + 2
        while length > LONGEST_CALL:
            length -= len(words.pop()) + 2
            words[-1:] = [words[-1].removesuffix(", …") + ", …"]
        return f"{name}({', '.join(words)})"

    @property
    def directive(self) -> str:
        if inspect.isclass(self.value):
            return "autoclass" if not issubclass(self.value, BaseException) else "autoexception"
        return "autofunction" if inspect.isroutine(self.value) else "autodata"


def _argument(parameter: inspect.Parameter) -> str:
    """``x``, ``x=1``, ``*x`` or ``**x``."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    short = isinstance(parameter.default, bool | int | float | str | None)
    default = f"={parameter.default!r}" if short else "" if parameter.default is parameter.empty else "=…"
    return stars + parameter.name + default


def names_of(module: ModuleType) -> list[str]:
    """The public names of a module that are no modules."""
    if hasattr(module, "__all__"):
        names = list(module.__all__)
    else:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


def public_names() -> dict[str, list[PublicName]]:
    """module → its names that no module before it has; those that `cumulant` itself exports are under that path."""
    top = importlib.import_module("cumulant")
    shortest = {id(getattr(top, name)): f"cumulant.{name}" for name in names_of(top)}
    seen: set[int] = set()
    out: dict[str, list[PublicName]] = {}
    for page in PAGES.values():
        for name in page.modules:
            module = importlib.import_module(f"cumulant.{name}")
            new = [(n, value) for n in names_of(module) if id(value := getattr(module, n)) not in seen]
            seen |= {id(value) for _, value in new}
            paths = [PublicName(shortest.get(id(value), f"cumulant.{name}.{n}"), value) for n, value in new]
            out[name] = sorted(paths, key=lambda item: item.path.rsplit(".", 1)[1].lower())
    return out


def pages() -> dict[str, str]:
    """File name → text, of all pages and their index."""
    names = public_names()
    out = {}
    for stem, page in PAGES.items():
        parts = [f"<!-- written by `python -m docs.generate` -->\n\n# {page.title}\n\n{page.words}\n"]
        for module in page.modules:
            if not names[module]:
                continue
            heading = f"## cumulant.{module}\n\n" if len(page.modules) > 1 else ""
            blocks = "\n".join(_directive(item) for item in names[module])
            words = importlib.import_module(f"cumulant.{module}").__doc__ or ""
            about = f".. automodule:: cumulant.{module}\n   :no-index:\n\n" if heading or "\n" in words else ""
            rows = [[f"`{item.call}`", item.summary] for item in names[module]]
            overview = markdown_table(["name", "what it is"], rows)
            parts.append(f"{heading}{overview}\n\n```{{eval-rst}}\n{about}{blocks}```\n")
        out[f"api/{stem}.md"] = "\n".join(parts)
    rows = [f"- [{page.title}]({stem}.md): {page.words}" for stem, page in PAGES.items()]
    count = sum(map(len, names.values()))
    text = "<!-- written by `python -m docs.generate` -->\n\n# Reference\n\n"
    text += f"All {count} public names: what each computes, the shapes of its arguments, examples that the tests run.\n"
    text += "The site that `make docs` builds shows the docstrings below these lists; `help(name)` does so in Python.\n"
    contents = "\n".join(PAGES)
    out["api/index.md"] = f"{text}\n" + "\n".join(rows) + f"\n\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n"
    return out


def _directive(item: PublicName) -> str:
    option = {"autoclass": "   :members:\n", "autodata": "   :no-value:\n"}.get(item.directive, "")
    return f".. {item.directive}:: {item.path}\n{option}"
