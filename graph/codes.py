"""Every kind of problem: its code, which never changes its meaning, what causes it, and what to do."""

from collections.abc import Iterator

import attrs


@attrs.frozen
class Code:
    """One kind of problem."""

    code: str
    title: str
    cause: str
    remedy: str
    warning: bool = False


GROUPS = {
    "1": "Files and their text",
    "2": "Components",
    "3": "Settings, edges and the graph",
    "4": "What components say themselves",
}

CODES = (
    Code(
        "DL101",
        "There is no such recipe",
        "A name on the command line or in `extends` is neither a file nor a recipe that ships.",
        "Write a path that ends in `.toml`, or one of the names that are offered.",
    ),
    Code(
        "DL102",
        "A recipe can't be read",
        "The file is missing, is no regular file, is not UTF-8, or is larger than 1 MiB.",
        "Give the path of a text file; `extends` is relative to the recipe that says it.",
    ),
    Code(
        "DL103",
        "This is not TOML",
        "The text breaks the rules of TOML, or is nested or long beyond what a person writes.",
        "Mend it where the problem says; TOML tells only of the first fault.",
    ),
    Code(
        "DL104",
        "A recipe extends itself",
        "Following `extends` leads back to a file that is being read.",
        "Cut one of the `extends` in the circle; put what both need into a third file.",
    ),
    Code(
        "DL105",
        "`extends` is no name",
        "`extends` takes a string or an array of strings.",
        'Write `extends = "pretrain"` or `extends = ["pretrain", "more.toml"]`.',
    ),
    Code(
        "DL106",
        "`extends` leads out",
        "A base is absolute, or lies, also by way of a link, outside of the current directory and the recipe's folder.",
        "Put the base beside the recipe, or run from a directory that holds both.",
    ),
    Code(
        "DL107",
        "A recipe of another format",
        "`format` is a number that this version can't read.",
        "Install the version that wrote it, or leave `format` out of what you write yourself.",
    ),
    Code(
        "DL108",
        "`unset` is no list",
        "`unset` takes an array of strings.",
        'Write `unset = ["listeners.progress", "clip.max_norm"]`.',
    ),
    Code(
        "DL109",
        "Nothing to unset",
        "`unset` names a node or key that the recipes below do not have.",
        "Mend the name, or leave it out.",
    ),
    Code(
        "DL110",
        "A word that is not understood",
        "Something on the command line is neither an option nor `node.key=value`.",
        "Write `node.key=value`; quote what the shell would take apart.",
    ),
    Code(
        "DL111",
        "A key outside of any table",
        "A value stands at the top of a recipe, before any `[node]`.",
        "Put it below the node that it belongs to.",
    ),
    Code(
        "DL112",
        "`vars` is misshapen",
        "`[vars]` must be a table, and each variable a single value or an array.",
        "Write `[vars]` and below it `name = value`.",
    ),
    Code(
        "DL113",
        "Keys of a node that is not there",
        "A table has no `use`, and no recipe below has a node of that name.",
        "Mend the name; or, if a new node is meant, say what it uses.",
    ),
    Code(
        "DL114",
        "A group that holds more than nodes",
        "Some members of a table have `use`, which makes it a group, and others have not.",
        "Give each member a `use`, or move the settings to the node that they belong to.",
    ),
    Code(
        "DL115",
        "A name that nodes can't have",
        "Names of nodes stand in references, file names and saved states.",
        "Use letters, digits, `_` and `-`, a letter first.",
    ),
    Code(
        "DL116",
        "A variable that nothing uses",
        "`[vars]` sets a name that no value refers to: most often a misspelt one.",
        "Mend the name, or remove it.",
        warning=True,
    ),
    Code(
        "DL201",
        "There is no such component",
        "`use` names nothing that ships or is installed. A recipe can't name Python code by its path.",
        "Take one of those that `drawloom list` shows; install the package that brings it.",
    ),
    Code(
        "DL202",
        "A package is missing",
        "The component needs a package that is not installed.",
        "Install what the problem names.",
    ),
    Code(
        "DL203",
        "No component, but a library",
        "The file exists, but holds no component, or more than one.",
        "Take one of the components beside it.",
    ),
    Code(
        "DL204",
        "`use` is no name",
        "`use` takes the name of a component, a string.",
        'Write `use = "data.bytes"`.',
    ),
    Code(
        "DL205",
        "A component can't be imported",
        "Its module fails as it is imported: that is a fault of the component or of its installation.",
        "Import it in Python to see where; tell its author.",
    ),
    Code(
        "DL206",
        "A component that can't be wired",
        "Its class asks for something that no recipe could write, or says things of itself that fail.",
        "Tell its author: fields are ports, or of types that TOML has values for.",
    ),
    Code(
        "DL207",
        "Two components of one name",
        "Two installed packages bring a component of the same name, or one has the name of one that ships.",
        "Uninstall one of them.",
    ),
    Code(
        "DL301",
        "A field that can't be set",
        "The container fills this field in itself.",
        "Remove the key.",
    ),
    Code(
        "DL302",
        "An unknown key",
        "The component has no setting or edge of this name; it may have belonged to another that `use` replaced.",
        "Mend the name: `drawloom list COMPONENT` shows all.",
    ),
    Code(
        "DL303",
        "A value that can't be",
        "It has another type than the setting, or breaks its bounds. Nothing is converted but integers to numbers.",
        "Write what is expected; `drawloom explain RECIPE NODE.KEY` says where the value comes from.",
    ),
    Code(
        "DL305",
        "A setting is missing",
        "The component needs a setting that has no default.",
        "Write it.",
    ),
    Code(
        "DL306",
        "A reference where none can be",
        "Text that begins with `@` or `$` refers to a node or variable, which a setting, or part of a text, can't.",
        "Double the sign if the text itself is meant; a variable stands for a whole value.",
    ),
    Code(
        "DL307",
        "There is no such variable",
        "`$vars.name` refers to a name that `[vars]` does not have.",
        "Mend the name, or write it into `[vars]`.",
    ),
    Code(
        "DL308",
        "A name that nothing has",
        "A setting names a node, value, parameter or the like, and no node offers one of that name.",
        "Mend the name.",
    ),
    Code(
        "DL310",
        "An edge of another shape",
        "The edge takes an array, or a table, of nodes.",
        'Write `["@name", ...]`, or `{ key = "@name" }`.',
    ),
    Code(
        "DL311",
        "No node, but a value",
        'An edge leads to a node: `"@name"`, or a table with `use`.',
        "Put `@` before the name.",
    ),
    Code(
        "DL312",
        "A node in place without `use`",
        "A table stands where a node is wanted, and does not say which component it uses.",
        'Write `{ use = "...", ... }`.',
    ),
    Code(
        "DL313",
        "There is no such node",
        "A reference names a node or group that the recipe does not have, or a group where a single node is wanted.",
        "Mend the name; `@group.*` means all members of a group.",
    ),
    Code(
        "DL314",
        "A node that does not fit",
        "The node does not keep the promises of the port: members, their types, how methods are called.",
        "Lead the edge to a node that does.",
    ),
    Code(
        "DL315",
        "An edge is missing",
        "A list of nodes is needed, and lists are never found by type.",
        'Write `key = ["@name", ...]`.',
    ),
    Code(
        "DL316",
        "An edge that can't be found by type",
        "A single edge was left out, and no node fits, or more than one.",
        "Write it, or add a node that fits.",
    ),
    Code(
        "DL317",
        "A node that needs a name",
        "Nodes of this kind are known by their names, in saved states for one, so they can't stand in place.",
        "Give it a table of its own and refer to it.",
    ),
    Code(
        "DL318",
        "The same node twice",
        "A list of nodes names one of them twice.",
        "Leave one out; or give the second a table of its own.",
    ),
    Code(
        "DL320",
        "A circle",
        "Nodes need one another, so none could be built first.",
        "Cut one of the edges that are listed.",
    ),
    Code(
        "DL321",
        "Nothing to run",
        "The recipe has no node of the name that is run.",
        "Write it, or extend a recipe that has it.",
    ),
    Code(
        "DL322",
        "A node that nothing needs",
        "No edge leads to it from what is run, so it will not be built: most often an edge was forgotten.",
        "Refer to it, or remove it.",
        warning=True,
    ),
    Code(
        "DL330",
        "A sequence out of order",
        "A member reads what nobody has written yet, or changes what nobody reads any more.",
        "Move it as the problem says.",
    ),
    Code(
        "DL401",
        "A rule of a component",
        "Settings of a node and its neighbours do not go together.",
        "As the problem says.",
    ),
    Code(
        "DL402",
        "Allowed, but hardly meant",
        "A component finds its settings odd.",
        "As the problem says; or leave it as it is.",
        warning=True,
    ),
)


def page() -> str:
    """All kinds of problems as Markdown, for `docs/problems.md`."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield "# Problems"
    yield ""
    yield "What `drawloom check` says, by code. Codes keep their meaning; `--format json` gives them to other programs."
    yield "This page is written by `python tests/golden`, from `graph/codes.py`."
    for digit, title in GROUPS.items():
        yield f"\n## {title}\n"
        for code in CODES:
            if code.code[2] == digit:
                yield f"### {code.code}: {code.title}{' (a warning)' if code.warning else ''}\n"
                yield f"{code.cause}\n\n*{code.remedy}*\n"
