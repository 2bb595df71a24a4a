"""Machine code is read as it is run: control words, loops, where a load's address comes from, what a warp waits for."""

import pytest

pytest.importorskip("triton")
from machine_code import written

from benchmarks import sass
from benchmarks.sass import NONE, load_kinds

# As nvdisasm printed it, of a loop over blocks compiled for sm_90: R153 is the block, R52 its row of the block table.
PART = """
.L_x_5:
 /*12e0*/ SHF.R.S32.HI R34, RZ, 0x1f, R153 ;               /* 0x0000001fff227819 */ /* 0x000fc80000011499 */
 /*12f0*/ LEA.HI R34, R34, R153, RZ, 0x5 ;                 /* 0x0000009922227211 */ /* 0x000fe200078f28ff */
 /*1330*/ SHF.R.S32.HI R35, RZ, 0x5, R34 ;                 /* 0x00000005ff237819 */ /* 0x000fe20000011422 */
 /*1350*/ IMAD.SHL.U32 R61, R35, 0x4, RZ ;                 /* 0x00000004233d7824 */ /* 0x000fc800078e00ff */
 /*1360*/ IMAD.WIDE R52, R61, 0x8, R52 ;                   /* 0x000000083d347825 */ /* 0x002fca00078e0234 */
 /*1370*/ LDG.E.64 R36, desc[UR10][R52.64] ;               /* 0x0000000a34247981 */ /* 0x000f28000c1e1b00 */
 /*1380*/ LDG.E.64 R38, desc[UR10][R52.64+0x8] ;           /* 0x0000080a34267981 */ /* 0x000f62000c1e1b00 */
 /*1450*/ IMAD R63, R37, R163.reuse, RZ ;                  /* 0x000000a3253f7224 */ /* 0x090fe400078e02ff */
 /*1460*/ IMAD.WIDE.U32 R58, R36, R163, R34 ;              /* 0x000000a3243a7225 */ /* 0x000fc800078e0022 */
 /*1470*/ IMAD.IADD R63, R59, 0x1, R63 ;                   /* 0x000000013b3f7824 */ /* 0x000fe200078e023f */
 /*1480*/ LEA R54, P5, R58, R38, 0xf ;                     /* 0x000000263a367211 */ /* 0x020fc800078a78ff */
 /*1490*/ LEA.HI.X R38, R58, R39, R63, 0xf, P5 ;           /* 0x000000273a267211 */ /* 0x000fe400028f7c3f */
 /*14a0*/ IADD3 R36, P5, R54, R103, RZ ;                   /* 0x0000006736247210 */ /* 0x000fc80007fbe0ff */
 /*14b0*/ IADD3.X R37, R38, UR12, RZ, P5, !PT ;            /* 0x0000000c26257c10 */ /* 0x000fe4000affe4ff */
 /*14f0*/ LDG.E.128 R36, desc[UR10][R36.64] ;              /* 0x0000000a24247981 */ /* 0x000ea2000c1e1d00 */
 /*1540*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;                    /* 0x0000000000007b1d */ /* 0x000fec0000010000 */
 /*1550*/ STS.128 [R152+UR4], R36 ;                        /* 0x0000002498007988 */ /* 0x0043e80008000c04 */
 /*1560*/ VIADD R153, R153, 0x1 ;                          /* 0x0000000199997836 */ /* 0x000fe20000000000 */
 /*1570*/ @P5 BRA `(.L_x_5) ;                              /* 0xffffffa800545947 */ /* 0x000fea000383ffff */
"""


def test_control_words_of_compiled_code():
    """The load of the codes releases scoreboard 2, which the store to shared memory waits for; and so on."""
    code = {one.address: one for one in sass.instructions(PART)}
    loads = [(at, one.stall, one.sets, one.waits) for at, one in code.items() if one.name == "LDG"]
    assert loads == [(0x1370, 4, 4, 0), (0x1380, 1, 5, 0), (0x14F0, 1, 2, 0)]
    assert code[0x1450].waits == 1 << 4 and code[0x1480].waits == 1 << 5  # the first to read R37, and R38
    store = code[0x1550]
    assert (store.name, store.modifiers, store.operands) == ("STS", ".128", ("[R152+UR4]", "R36"))
    assert (store.waits, store.sets, store.frees, store.stall) == (1 << 2, NONE, 1, 4)
    assert code[0x1360].stall == 5 and code[0x1360].waits == 1 << 1  # for c[0x0][0x228], loaded before
    assert code[0x1570].target == 0x12E0


def test_every_word_is_taken_apart():
    for stall, sets, frees, waits in [(0, 0, 0, 0), (15, 7, 7, 63), (4, 5, 2, 8), (1, 0, 7, 33)]:
        word = (stall | sets << 5 | frees << 8 | waits << 11) << 41
        assert sass.control(word | 1 << 45 | (1 << 41) - 1 | 15 << 58) == (stall, sets, frees, waits)  # beside others


LOOPS = """
.text.attend:
 /*0000*/ LDC R1, c[0x0][0x28] ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
.L_x_1:
 /*0010*/ IADD3 R4, R4, 0x40, RZ ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
.L_x_0:
 /*0020*/ LOP3.LUT R26, R40, 0xf0f0f0f, RZ, 0xc0, !PT ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
 /*0030*/ HMMA.16816.F32 R20, R20, R24, RZ ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
 /*0040*/ @!P0 BRA `(.L_x_0) ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
 /*0050*/ FMUL R3, R3, R4 ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
 /*0060*/ @P1 BRA `(.L_x_1) ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
 /*0070*/ FFMA R3, R3, R4, R5 ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
 /*0080*/ EXIT ; /* 0x0000000000000000 */ /* 0x000fe20000000000 */
.L_x_2:
 /*0090*/ BRA `(.L_x_2); /* 0x0000000000000000 */ /* 0x000fe20000000000 */
.L_x_3:
"""


def test_loops_are_passed_through_as_they_are_run():
    found, inner = sass.instructions(LOOPS), ["LOP3", "HMMA", "BRA"]
    assert [one.name for one in found] == ["LDC", "IADD3", *inner, "FMUL", "BRA", "FFMA", "EXIT", "BRA"]
    assert [one.name for one in sass.main_loop(found, 3)] == ["IADD3", *3 * inner, "FMUL", "BRA"]
    assert [one.name for one in sass.main_loop(found, 1)] == inner
    once = ["IADD3", *inner, "FMUL", "BRA"]
    assert [one.name for one in sass.whole(found, 2)] == ["LDC", *2 * once, "FFMA", "EXIT"]
    with pytest.raises(ValueError, match="float16 products"):
        sass.main_loop(found[:2], 1)


def test_products_are_counted_alike():
    small, group = written("HMMA.16816.F32 R20, R20, R24, RZ", "HGMMA.64x32x16.F32 R40, R100, gdesc[UR8], R40")
    assert (small.products, group.products) == (1, 4)
    assert written("FMUL R1, R2, R3")[0].products == 0


def test_loads_are_told_apart():
    """Addresses out of the block table are a table's, what they lead to is a stream, what that leads to a gather."""
    passed = sass.instructions(PART)
    kinds = load_kinds(passed)
    assert {passed[i].address: kind for i, kind in kinds.items()} == {
        0x1370: "table",
        0x1380: "table",
        0x14F0: "stream",
    }
    gathers = written(
        "LDG.E.128 R8, desc[UR4][R4.64]",
        "LOP3.LUT R9, R9, 0xff, RZ, 0xc0, !PT",
        "IMAD.WIDE.U32 R10, R9, 0x8, R20",
        "LDG.E.64 R12, desc[UR4][R10.64]",
        "LDG.E R14, desc[UR4][R20.64]",
        "IADD3 R4, P0, R4, 0x200, RZ",
        "IADD3.X R5, R5, RZ, RZ, P0, !PT",
        "LDS R16, [R3]",
        "IMAD.WIDE R16, R16, 0x4, R20",
        "LDG.E R18, desc[UR4][R16.64]",
    )
    assert load_kinds(gathers) == {0: "stream", 3: "gather", 4: "table", 9: "gather"}
    assert load_kinds(gathers, once=True)[4] == "stream"  # nobody has read it before
    chosen = written(
        "IADD3 R4, R4, 0x1, RZ",
        "LOP3.LUT R6, R4, 0x1, RZ, 0xc0, !PT",
        "IMAD.WIDE R8, R6, 0x1000, R20",
        "LDG.E.128 R12, desc[UR4][R8.64]",
        "IMAD.WIDE R8, R4, 0x1000, R20",
        "LDG.E.128 R12, desc[UR4][R8.64]",
    )
    assert load_kinds(chosen) == {3: "table", 5: "stream"}
    assert [need.wavefronts for need in sass.needs(chosen) if need.kind] == [4, 4]


def test_the_number_of_a_page_is_a_tables():
    """Where blocks are pages, what a counter finds leads to a stream, but what that gives to a gather."""
    passed = written(
        "IADD3 R4, R4, 0x1, RZ",
        "IMAD.WIDE R6, R4, 0x4, R20",
        "LDG.E R8, desc[UR4][R6.64]",
        "IMAD.WIDE R10, R8, R22, R24",
        "LDG.E.128 R12, desc[UR4][R10.64]",
        "IMAD.WIDE R16, R12, 0x8, R26",
        "LDG.E R18, desc[UR4][R16.64]",
    )
    assert load_kinds(passed, pages=True) == {2: "table", 4: "stream", 6: "gather"}
    assert load_kinds(passed) == {2: "stream", 4: "gather", 6: "gather"}


def test_a_spilled_address_stays_one():
    passed = written(
        "IADD3 R4, P0, R4, 0x200, RZ",
        "LDG.E.64 R6, desc[UR4][R4.64]",
        "STL [R1+0x10], R6",
        "STL [R1+0x14], R7",
        "LDL R8, [R1+0x10]",
        "LDL R9, [R1+0x14]",
        "LDG.E R10, desc[UR4][R8.64]",
    )
    assert load_kinds(passed) == {1: "table", 6: "stream"}


def test_waits_for_memory_are_counted_in_series():
    """Two loads in flight together are one wait; one that is issued after the other came is another."""
    start = ["IADD3 R4, P0, R4, 0x200, RZ | 4", "IADD3.X R5, R5, RZ, RZ, P0, !PT | 4"]
    first, second = "LDG.E R8, desc[UR4][R4.64] | 1 0", "LDG.E R9, desc[UR4][R4.64+0x80] | 1 1"
    use = ["FADD R10, R8, R8 | 4 7 7 1", "FADD R10, R9, R9 | 4 7 7 2"]
    together, apart = written(*start, first, second, *use), written(*start, first, use[0], second, use[1])
    assert sass.exposed(together, sass.needs(together)) == 1
    assert sass.exposed(apart, sass.needs(apart)) == 2
    table = written(*start, first.replace("R4.64", "R6.64"), use[0])
    assert sass.exposed(table, sass.needs(table)) == 0
    ahead = written(*start, "FADD R10, R8, R8 | 4 7 7 1", first)  # for the next pass: still one wait a pass
    assert sass.exposed(ahead, sass.needs(ahead)) == 1


def test_copies_in_groups_are_waited_for_by_group():
    copies = ["IADD3 R4, R4, 0x200, RZ", "LDGSTS.E.128 [R2], desc[UR4][R4.64]", "LDGDEPBAR"]
    oldest = written(*copies, "DEPBAR.LE SB0, 0x1 | 4")
    newest = written(*copies, "DEPBAR.LE SB0, 0x0 | 4")
    mixed = written(*copies, *copies, "DEPBAR.LE SB0, 0x1", "DEPBAR.LE SB0, 0x0")
    assert sass.exposed(newest, sass.needs(newest)) == 1
    assert sass.exposed(oldest, sass.needs(oldest)) == 1
    assert sass.exposed(mixed, sass.needs(mixed)) == 1  # both were in flight when the first was waited for


def test_what_a_pass_takes():
    passed = written(
        "PRMT R1, R2, 0x5410, R3 | 2", "IMAD R1, R2, R3, R4 | 5", "HFMA2 R1, R2, R3, R4 | 3", "FMUL R1, R2, R3 | 0",
        "HMMA.16816.F32 R20, R20, R24, RZ | 6", "LDS.128 R8, [R2] | 1", "LDSM.16.MT88.4 R8, [R2] | 1",
        "SHFL.BFLY PT, R7, R4, 0x10, 0x1f | 1", "BAR.SYNC.DEFER_BLOCKING 0x0 | 5",
        "IADD3 R4, R4, 0x1, RZ | 4", "LDG.E.128 R8, desc[UR4][R4.64] | 1 0",
        "IMAD.WIDE.U32 R10, R8, 0x8, R20 | 4 7 7 1", "LDG.E.64 R12, desc[UR4][R10.64] | 1 0",
    )  # fmt: skip
    took = sass.counted(passed, 0.5, 2)
    assert took == {
        "instructions_per_element": 6.5, "multiplications_per_element": 1.0, "alu_per_element": 1.0,
        "fma_per_element": 2.0, "tensor_per_element": 0.5, "shared_wavefronts_per_element": 0.5 * (4 + 4 + 1),
        "global_wavefronts_per_element": 0.5 * 4, "gather_wavefronts_per_element": 0.5 * 2 * sass.GATHER,
        "exposed_loads": 2, "barriers": 2, "stall_cycles": 2 * (2 + 5 + 3 + 1 + 6 + 1 + 1 + 1 + 5 + 4 + 1 + 4 + 1),
    }  # fmt: skip
