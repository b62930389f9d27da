"""Importing this makes flash_attn, flash_attn_interface and flash_attn_3 names of dash_attn in this process.

    import dash_attn.as_flash_attn  # before transformers and others that look for flash_attn

As `dash_attn.aliases.activate`, which says when it raises. It is forced where DASH_ATTN_AS_FLASH_ATTN=force is set.
"""

import os

from . import aliases

aliases.activate(force=os.environ.get(aliases.ENVIRONMENT) == "force")
