"""Builds dash_attn's extensions: `_schedule` (host only) and `_autograd` (torch's C++ API) always, `_C` (the CUDA ops)
where nvcc is. docs/install.md lists the environment variables that choose what is built."""

from __future__ import annotations

import copy
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT / "build_support"))

import identity  # noqa: E402
import toolchain  # noqa: E402
import variants  # noqa: E402

toolchain.check_setuptools(setuptools.__version__)
try:
    import torch
except ModuleNotFoundError:
    wanted = f"pip install 'torch>={toolchain.OLDEST_TORCH}'"
    raise SystemExit(f"building dash_attn needs torch in this Python: {wanted}") from None
toolchain.check_torch(torch.__version__)

from torch.utils import cpp_extension  # noqa: E402

BUILD = ROOT / "build"
CSRC = str(ROOT / "csrc")
TORCH = Path(torch.__file__).parent


def files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path("csrc").glob(pattern))


def schedule_extension() -> Extension:
    try:
        import pybind11

        include = pybind11.get_include()
    except ModuleNotFoundError:
        include = str(TORCH / "include")
    return Extension(
        "dash_attn._schedule",
        ["csrc/bindings/schedule_module.cpp"],
        include_dirs=[CSRC, include],
        extra_compile_args=toolchain.SCHEDULE_CXX,
        depends=files("**/*.h"),
        language="c++",
    )


def autograd_extension() -> Extension:
    """Loaded by torch.ops.load_library, so it needs nothing of Python's; it fits the torch it is built with alone."""
    return cpp_extension.CppExtension(
        "dash_attn._autograd",
        ["csrc/bindings/autograd.cpp", "csrc/bindings/fingerprint.cpp"],
        include_dirs=[CSRC],
        extra_compile_args=toolchain.AUTOGRAD_CXX,
        depends=files("**/*.h"),
        py_limited_api=True,
    )


def ops_extension() -> Extension:
    """The CUDA ops; what depends on nvcc is added by `add_kernels` when something is built."""
    return cpp_extension.CppExtension(
        "dash_attn._C",
        files("launch/*.cu", "bindings/*_ops.cpp"),
        include_dirs=[CSRC],
        extra_link_args=["-Wl,--no-as-needed", "-ltorch_cuda", "-Wl,--as-needed"],
        extra_compile_args={"cxx": toolchain.OPS_CXX, "nvcc": toolchain.OPS_NVCC},
        depends=files("**/*.h"),
        py_limited_api=True,
    )


def add_kernels(extension: Extension, cuda_home: Path) -> None:
    nvcc = toolchain.nvcc_release(cuda_home)
    toolchain.check_cuda(nvcc, torch.version.cuda)
    selected = variants.select_variants(variants.read_variants(Path("csrc/launch/variants.def")))
    generated = BUILD / "generated"
    extension.sources += [str(unit.relative_to(ROOT)) for unit in variants.generate(selected, generated)]
    extension.depends.append(str(generated / "built_variants.def"))
    extension.include_dirs += [str(generated), str(cuda_home / "include")]
    stub = toolchain.torch_cuda_library_dir(TORCH / "lib", BUILD / "stub", os.environ.get("CXX", "c++"))
    folder, runtime = toolchain.cudart(cuda_home)
    extension.library_dirs += [str(stub), str(folder)]
    extension.libraries.append(runtime)
    print(f"dash_attn: CUDA {nvcc} in {cuda_home}, {len(selected)} kernels", flush=True)

    cpp_extension.CUDA_HOME = str(cuda_home)
    # A torch without CUDA would not let ninja learn the headers of a CUDA source.
    torch.version.cuda = torch.version.cuda or nvcc
    jobs = os.environ.get("DASH_ATTN_JOBS") or os.environ.get("MAX_JOBS") or str(toolchain.default_jobs())
    os.environ["MAX_JOBS"] = jobs


class Build(build):
    """A wheel holds what this build makes: nothing that an earlier one left, such as kernels."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        # Beside the package, where Python looks for such files at its start.
        self.mkpath(self.build_lib)
        self.copy_file("build_support/dash_attn_as_flash_attn.pth", self.build_lib)


class BuildExtension(cpp_extension.BuildExtension):
    cuda_home: Path | None = None
    # Why the kernels are left out; None where they are built.
    without_kernels: str | None = None

    def finalize_options(self):
        super().finalize_options()
        # One folder whoever builds (pip, an editable install, setup.py), so that a second build is quick.
        self.build_temp = str(BUILD / f"objects-{sysconfig.get_platform()}-{sys.implementation.cache_tag}")
        # Two of the extensions are one long compilation each, which the kernels need not wait for.
        self.parallel = len(self.extensions)

    def build_extensions(self):
        origin = identity.write(ROOT, BUILD / "generated", torch.__version__)
        for extension in self.extensions:
            extension.sources.append(str(origin.relative_to(ROOT)))
            if extension.name == "dash_attn._C":
                add_kernels(extension, self.cuda_home)
        super().build_extensions()
        self.note_absence(Path(self.get_ext_fullpath("dash_attn._C")).parent)

    def copy_extensions_to_source(self):
        """For an editable install."""
        super().copy_extensions_to_source()
        self.note_absence(ROOT / "dash_attn")

    def note_absence(self, package: Path) -> None:
        # The package says so when it is imported; pip shows nothing of what is printed here.
        note = package / "without_kernels.txt"
        if self.without_kernels is not None:
            note.write_text(f"{self.without_kernels}\n")
        else:
            note.unlink(missing_ok=True)

    def build_extension(self, extension):
        # A folder each: torch writes one build.ninja to it.
        command = copy.copy(self)
        command.build_temp = os.path.join(self.build_temp, extension.name)
        extension.extra_objects += toolchain.shared_libstdcxx(os.environ.get("CXX", "c++"))
        super(BuildExtension, command).build_extension(extension)


def main() -> None:
    ninja = toolchain.put_ninja_on_path()
    extensions = [schedule_extension(), autograd_extension()]
    BuildExtension.cuda_home = toolchain.find_cuda_home()
    if os.environ.get("DASH_ATTN_SKIP_CUDA") == "1":
        BuildExtension.without_kernels = "DASH_ATTN_SKIP_CUDA=1 was set"
    elif BuildExtension.cuda_home is None:
        BuildExtension.without_kernels = "nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"
    else:
        if not ninja:
            raise SystemExit("building the CUDA ops needs ninja: pip install ninja")
        extensions.append(ops_extension())
    if reason := BuildExtension.without_kernels:
        print(f"dash_attn: building WITHOUT the CUDA ops: {reason}. CUDA tensors will raise.", flush=True)
    commands = {"build": Build, "build_ext": BuildExtension.with_options(use_ninja=ninja)}
    setup(ext_modules=extensions, cmdclass=commands)


main()
