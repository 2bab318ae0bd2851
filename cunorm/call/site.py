"""The call site: a function whose text is made from the number of arrays that a call takes and returns.

A loop over operands would double the 2 us of a call, so the loop runs here, once, over lines of text. A site looks up
the recipe of what it is given, allocates and launches. It leaves any other call to `run` of the module that it is made
for: one whose recipe is not kept yet, or with a number for an operand, an array to copy, or another current device.
"""

from __future__ import annotations

from typing import Any

SITE = """
def site(call, eps, out, arrays):
    {arrays}, = arrays
    try:
        low = 0{described}
        key = (
            call, eps, type(eps), low % 16 == 0 or aligned(call, arrays, out), {layouts}
        )
        recipe = _recipes.kept(key)
    except (AttributeError, TypeError, ValueError):  # no array, or no hash
        recipe = key = None
    if recipe is None or recipe.everyday_on != _current_device():
        return run(call, eps, out, arrays, key)
    if low % recipe.widest:
        check_addresses(call, recipe, arrays, out)
{allocated}
    device_id = recipe.device_id
{workspace}
    launch.run(
        recipe.plan,
        device_id,
        _current_stream(device_id).ptr,
        recipe.order(({pointers}, recipe.eps, 0, 0)),  # null for a statistic that is not wanted
        {workspace_pointer}
    )
    return {results}
"""


def text(arrays: int, results: int | None, *, out: bool, workspace: bool) -> str:
    """Return the text of the site of calls that take and return so many arrays.

    None stands for as many results as the recipe says. With `out` the call may give memory for the first result.
    """
    names = [f"array{i}" for i in range(arrays)]
    described = [*names, "out"] if out else names
    pointers = [f"{name}_pointer" for name in names]
    if results is None:
        allocated = "    results = [cupy.ndarray(shape, dtype) for shape, dtype in recipe.allocated]\n"
        pointers.append("*[result.data.ptr for result in results]")
        returned = "[results[place] for place in recipe.places]"
    else:
        names_of_results = [f"result{i}" for i in range(results)]
        lines = [f"    {''.join(f'({name}_shape, {name}_dtype), ' for name in names_of_results)}= recipe.allocated"]
        lines += [f"    {name} = cupy.ndarray({name}_shape, {name}_dtype)" for name in names_of_results]
        if out:
            given = ", ".join(f"{name}_pointer" for name in described)
            lines[1] = (
                "    if out is None:\n"
                "        result0 = cupy.ndarray(result0_shape, result0_dtype)\n"
                "    else:\n"
                f"        check_out(call, recipe, ({given}))\n"
                "        result0 = out"
            )
        allocated = "\n".join(lines) if names_of_results else ""
        pointers += [f"{name}.data.ptr" for name in names_of_results]
        returned = f"({', '.join(names_of_results)},)" if names_of_results else "()"
    return SITE.format(
        arrays=", ".join(names),
        described="".join(map(_described, described)),
        layouts=", ".join(f"{name}_layout" for name in described),
        allocated=allocated,
        pointers=", ".join(pointers),
        workspace="    workspace = cupy.cuda.alloc(recipe.plan.workspace)" if workspace else "",
        workspace_pointer="workspace.ptr," if workspace else "",
        results=returned,
    )


def _described(name: str) -> str:
    """Return the lines that describe an array, which may be absent."""
    return f"""
        if {name} is None:
            {name}_pointer, {name}_layout = 0, None
        else:
            memory = {name}.data
            {name}_pointer = memory.ptr
            low |= {name}_pointer
            {name}_layout = ({name}.shape, {name}.strides, {name}.dtype, memory.device_id)"""


def made(module: dict[str, Any], arrays: int, results: int | None, *, out: bool, workspace: bool) -> Any:
    """Return the site with the names of a module, as if its text stood there."""
    code = compile(text(arrays, results, out=out, workspace=workspace), f"<site of {arrays} arrays>", "exec")
    namespace: dict[str, Any] = {}
    exec(code, module, namespace)
    return namespace["site"]
