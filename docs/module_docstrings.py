"""For the API reference: a mechanism is one file, which opens with its formula; its class then says nothing twice.

This extension of griffe gives such a class or function, where a package exports it without a docstring of its own, the docstring of its file.
"""

from __future__ import annotations

from typing import Any

import griffe


class ModuleDocstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        self.fill(pkg)

    def fill(self, module: griffe.Module) -> None:
        for name in module.exports or ():
            member = module.members.get(str(name))
            try:
                target = member.final_target if isinstance(member, griffe.Alias) else member
            except griffe.AliasResolutionError:  # a name of another package, which the reference does not document
                continue
            if target is None or target.docstring or not (target.is_class or target.is_function):
                continue
            home = target.parent
            if home is not None and home.is_module and not home.is_init_module and home.docstring:
                target.docstring = griffe.Docstring(home.docstring.value, parent=target, lineno=home.docstring.lineno)
        for inner in module.modules.values():
            if not inner.is_alias:
                self.fill(inner)
