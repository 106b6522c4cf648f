"""The reader of machine code finds instructions and the main loop."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.kernels.machine_code import GCN_LINE, SASS_LINE, _instructions, _main_loop

SASS = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/                   BRA.DIV ~URZ, `(.L_x_3) ;
.L_x_4:
        /*0050*/              @!P1 BRA `(.L_x_1) ;
.L_x_0:
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   WARPSYNC.COLLECTIVE R46, `(.L_x_5) ;
.L_x_5:
        /*0080*/                   BRA.U UP0, `(.L_x_4) ;
.L_x_9:
        /*0090*/                   BRA `(.L_x_9);
"""

GCN = """
kernel:                                 ; @kernel
\ts_load_dwordx2 s[0:1], s[2:3], 0x0
\t.loc\t1 181 9
.LBB0_2:                                ;   in Loop: Header=BB0_3 Depth=1
\tglobal_load_dwordx4 v[0:3], v4, s[0:1]
.LBB0_1:
\tv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
\ts_cbranch_scc0 .LBB0_1
\ts_cbranch_scc1 .LBB0_2
\ts_endpgm
"""


def test_sass():
    lines = _instructions(SASS, SASS_LINE)
    assert len([line for line in lines if not line.startswith(".L")]) == 10
    assert lines[1] == "BRA `(.L_x_0) ;"  # without its predicate
    assert len(_main_loop(lines)) == 4  # neither the jump out of the rare path nor the trap at the end


def test_gcn():
    lines = _instructions(GCN, GCN_LINE)
    assert [line for line in lines if line.startswith(".L")] == [".LBB0_2:", ".LBB0_1:"]
    assert len(lines) == 8
    assert len(_main_loop(lines)) == 2  # the inner of two


TWO_LOOPS = """
.L_x_1:
        /*0010*/                   DEPBAR.LE SB0, 0x1 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], R4 ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   DEPBAR.LE SB0, 0x0 ;
        /*0050*/                   FSEL R4, R4, -INF , !P0 ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], R4 ;
        /*0070*/              @!P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0090*/                   IADD3 R1, R1, 0x1, RZ ;
        /*00a0*/                   IADD3 R1, R1, 0x1, RZ ;
        /*00b0*/                   IADD3 R1, R1, 0x1, RZ ;
        /*00c0*/              @!P1 BRA `(.L_x_3) ;
"""


def test_the_main_loop_has_products_and_no_masks():
    """Not the loop with masks, which runs once per tile of rows, nor a longer one without products."""
    loop = _main_loop(_instructions(TWO_LOOPS, SASS_LINE))
    assert len(loop) == 3 and loop[0] == "DEPBAR.LE SB0, 0x1 ;"
