"""Extensions: methods of papers beside the core; a run without an extension imports none.

A choice of a strategy or a setting names its extension by place (`engine.extension`,
`engine.curvature.lengths`, a solver's `part`), so that nothing below imports this room.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
