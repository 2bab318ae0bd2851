"""Compile files of CUDA by a given NVRTC: `python compile_by.py LIBRARY FILE ... -- OPTION ...`.

It is a process of its own, because an NVRTC may crash. It prints the name of each file before it is compiled, and the
log of the first that fails.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def main(library: str, *arguments: str) -> int:
    nvrtc, at = ctypes.CDLL(library), arguments.index("--")
    options = [option.encode() for option in arguments[at + 1 :]]
    for file in arguments[:at]:
        print(file, flush=True)
        program = ctypes.c_void_p()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), Path(file).read_bytes(), b"kernel.cu", 0, None, None)
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            print(log.value.decode())
            return 1
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
