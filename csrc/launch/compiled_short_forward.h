// For the translation units that setup.py writes for kernels of short query tiles.
#pragma once

#include "compiled_forward.h"
