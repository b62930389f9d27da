"""Builds dash_attn: `_schedule` (host only, always) and `_C` (the CUDA ops, where nvcc is). README.md lists the
environment variables that limit what is built."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "build_support"), str(ROOT / "third_party")]

import outer  # noqa: E402
import progress  # noqa: E402
import ptxas  # noqa: E402
import toolchain  # noqa: E402
import variants as variant_list  # noqa: E402
from find_cutlass import cutlass_version, find_cutlass  # noqa: E402

os.chdir(ROOT)
BUILD = ROOT / "build"
REPORT = "_build_report.json"
# The oldest torch whose stable ABI the binary may use: 2.11.
TORCH_TARGET_VERSION = "0x020b000000000000"
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
# torch's build flags take the operators of 16-bit types away from CUDA sources, which CUTLASS uses.
HALF_OPERATORS = [
    f"-U__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
]

if not outer.make_importable("torch"):
    raise SystemExit("building dash_attn needs torch 2.11 or newer in this Python: pip install torch")

import torch  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402


def log(message: str) -> None:
    print(f"dash_attn: {message}", flush=True)


def files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path("csrc").glob(pattern))


def schedule_extension() -> Extension:
    if outer.make_importable("pybind11"):
        import pybind11

        include = pybind11.get_include()
    else:
        include = str(Path(torch.__file__).parent / "include")
    return Extension(
        "dash_attn._schedule",
        ["csrc/bindings/schedule_module.cpp"],
        include_dirs=[str(ROOT / "csrc"), include],
        extra_compile_args=["-O2", "-g0", "-std=c++17", "-Wall", "-fvisibility=hidden"],
        depends=files("*.h", "config/*.h", "schedule/*.h"),
        language="c++",
    )


def cuda_extension(cuda_home: Path) -> tuple[Extension, dict]:
    """The extension, and what is known of it before it is built."""
    cutlass = find_cutlass()
    release = toolchain.nvcc_release(cuda_home)
    if torch.version.cuda and torch.version.cuda.split(".")[0] != release.split(".")[0]:
        raise SystemExit(f"nvcc is of CUDA {release}, torch of {torch.version.cuda}: the major versions must agree")
    selected = variant_list.select_variants(variant_list.read_variants(Path("csrc/launch/variants.def")))
    generated = BUILD / "generated"
    units = [unit.relative_to(ROOT) for unit in variant_list.generate(selected, generated)]
    log(f"CUDA {release} in {cuda_home}, CUTLASS {cutlass_version(cutlass)}, {len(selected)} kernels")

    torch_lib = Path(torch.__file__).parent / "lib"
    compiler = os.environ.get("CXX", "c++")
    common = ["-O3", "-std=c++17", "-DNDEBUG", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    # libcudart is shared, not static: torch has loaded the library of this soname before ours, so
    # the device guard, the stream and the kernels meet one runtime.
    extension = cpp_extension.CppExtension(
        "dash_attn._C",
        [str(unit) for unit in units] + files("launch/*.cu", "backward/*.cu", "bindings/torch_ops.cpp"),
        include_dirs=[str(ROOT / "csrc"), str(generated), str(cutlass), str(cuda_home / "include")],
        library_dirs=[
            str(toolchain.torch_cuda_library_dir(torch_lib, BUILD / "stub", compiler)),
            str(cuda_home / "lib64"),
        ],
        libraries=["cudart"],
        extra_link_args=["-Wl,--no-as-needed", "-ltorch_cuda", "-Wl,--as-needed"],
        extra_compile_args={
            "cxx": [*common, "-g0", "-Wall", "-fvisibility=hidden"],
            "nvcc": [
                *common,
                *HALF_OPERATORS,
                ARCHITECTURE,
                "--expt-relaxed-constexpr",
                "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
                "-Xcompiler=-fvisibility=hidden",
                "-Xptxas=-v",
            ],
        },
        depends=files("**/*.h") + [str(generated / "built_variants.def")],
        py_limited_api=True,
    )
    known = {
        "cuda": release,
        "cutlass": cutlass_version(cutlass),
        "torch": torch.__version__,
        "arch": "sm_90a",
        "variants": [variant._asdict() for variant in selected],
    }
    return extension, known


def why_no_cuda(cuda_home: Path | None) -> str | None:
    if os.environ.get("DASH_ATTN_SKIP_CUDA") == "1":
        return "DASH_ATTN_SKIP_CUDA=1 is set"
    if cuda_home is None:
        return "nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"
    return None


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, with a fixed build folder, rebuilding on changed headers, and the report of ptxas."""

    report: dict = {}

    def finalize_options(self):
        super().finalize_options()
        # One folder whoever builds (pip, an editable install, setup.py), so that a second build is quick.
        self.build_temp = str(BUILD / f"objects-{sysconfig.get_platform()}-{sys.implementation.cache_tag}")

    def _remove_stale_objects(self):
        """ninja learns the headers of a CUDA source only where torch was built with CUDA; see nvcc.py."""
        for listing in Path(self.build_temp).rglob("*.o.d"):
            target = listing.with_suffix("")
            if not target.is_file():
                continue
            _, _, names = listing.read_text().replace("\\\n", " ").partition(": ")
            built = target.stat().st_mtime
            if any(not os.path.exists(name) or os.path.getmtime(name) > built for name in names.split()):
                target.unlink()

    def _object_reports(self) -> list[dict]:
        extension = next(e for e in self.extensions if e.name == "dash_attn._C")
        objects = [Path(self.build_temp) / Path(s).with_suffix(".o") for s in extension.sources if s.endswith(".cu")]
        return [json.loads(Path(f"{path}.ptxas.json").read_text()) for path in objects]

    def _write_report(self):
        report = dict(self.report)
        if "reason" not in report:
            units = self._object_reports()
            report["units"] = {unit["source"]: unit["seconds"] for unit in units}
            report["kernels"] = [kernel for unit in units for kernel in unit["kernels"]]
            report["clean"] = not any(ptxas.faults(kernel) for kernel in report["kernels"])
            most = max((kernel["registers"] for kernel in report["kernels"]), default=0)
            log(f"{len(report['kernels'])} kernels, at most {most} registers, clean: {report['clean']}")
        package = Path(self.build_lib) / "dash_attn"
        package.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1) + "\n"
        (package / REPORT).write_text(text)
        if "reason" in report:
            # The folder may hold the kernels of an earlier build, which an install would pick up.
            (package / "_C.abi3.so").unlink(missing_ok=True)
        checkout = Path("dash_attn")
        if self.inplace and not ("reason" in report and (checkout / "_C.abi3.so").is_file()):
            (checkout / REPORT).write_text(text)

    def run(self):
        inplace = self.inplace
        self._remove_stale_objects()
        with progress.short_lines():
            super().run()
        self.inplace = inplace
        self._write_report()


def main() -> None:
    cuda_home = toolchain.find_cuda_home()
    reason = why_no_cuda(cuda_home)
    extensions = []
    if Path("csrc/bindings/schedule_module.cpp").is_file():
        extensions.append(schedule_extension())
    ninja = toolchain.put_ninja_on_path()
    if reason is None:
        if not ninja:
            raise SystemExit("building the CUDA ops needs ninja: pip install ninja")
        extension, BuildExtension.report = cuda_extension(cuda_home)
        extensions.append(extension)
        cpp_extension.CUDA_HOME = str(cuda_home)
        os.environ["PYTORCH_NVCC"] = f"{sys.executable} {ROOT / 'build_support' / 'nvcc.py'} {cuda_home}/bin/nvcc"
        os.environ["MAX_JOBS"] = os.environ.get("DASH_ATTN_JOBS") or os.environ.get("MAX_JOBS") or str(
            toolchain.default_jobs()
        )
    else:
        BuildExtension.report = {"reason": reason}
        log(f"building WITHOUT the CUDA ops: {reason}. Where they are missing, CUDA tensors raise.")
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtension.with_options(use_ninja=ninja)})


main()
