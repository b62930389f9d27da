"""Importing this module makes flash_attn, flash_attn_interface and flash_attn_3 names of dash_attn in this process.

    import dash_attn.as_flash_attn  # before transformers and other packages that look for flash_attn

The import calls `dash_attn.aliases.activate` and raises its errors. DASH_ATTN_AS_FLASH_ATTN=force forces the names.
"""

import os

from . import aliases

aliases.activate(force=os.environ.get(aliases.ENVIRONMENT) == "force")
