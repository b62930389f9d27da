"""The variable-length batches that are measured, by name: the length of each sequence, for queries and keys alike.

A batch never changes its name or its lengths, because results contain only the name.
"""

# fmt: off
PACKS: dict[str, tuple[int, ...]] = {
    "8x2048": (2048,) * 8,
    # Documents of natural lengths, with a median near 640.
    "lognormal": (
        999, 536, 1864, 1503, 388, 1839, 234, 440, 300, 223, 2009, 734, 205, 2029, 1989, 3032, 240, 556, 189,
        1301, 157, 1587, 371, 581, 577, 534, 437, 674, 1492, 1218, 895, 696, 226, 1638, 654, 632, 553, 374, 648,
        777,
    ),  # fmt: skip
    "one long": (12288, *(64,) * 64),
    # Examples of fine-tuning.
    "sft mix": (
        157, 570, 1401, 462, 1227, 1296, 470, 287, 1228, 622, 166, 1478, 244, 270, 134, 1027, 129, 675, 611,
        650, 324, 1379, 478, 805, 694, 242, 442, 426, 622, 1180, 444, 1444, 658, 1427, 703, 1031, 759, 1116,
        1070, 333,
    ),  # fmt: skip
    "32x512": (512,) * 32,
    "2x8192": (8192,) * 2,
    "8192x34": (34,) * 8192,
    "one of 32k": (*(34,) * 2048, 32768),
    # Every eighth sequence is long.
    "long tail": (8192, 512, 585, 658, 731, 804, 877, 950) * 4,
    "mostly empty": (2048, *(0,) * 127) * 8,
}
# fmt: on
