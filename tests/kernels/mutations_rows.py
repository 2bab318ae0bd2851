"""Mistakes in where rows wait and in where they end."""

from mutation import Mutation

MUTATIONS = (
    # Rows in shared memory
    Mutation(
        "one group of copies more is left pending",
        "copies_wait<kAhead - 1>();",
        "copies_wait<kAhead>();",
        "CTA",
        (
            ("results", "y: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "one group of copies more is left pending, forward",
        "copies_wait<kAhead - 1>();",
        "copies_wait<kAhead>();",
        "cluster",
        (
            ("results", "y: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "nobody waits for copies",
        "DEVICE static void arrived() { copies_wait<kAhead - 1>(); }",
        "DEVICE static void arrived() {}",
        "buffers",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "copies are not committed",
        "DEVICE static void sent() { copies_commit(); }",
        "DEVICE static void sent() {}",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "no commit in turns with nothing to ask for",
        "RowsIn::kAhead - 1);\n      RowsIn::sent();",
        "RowsIn::kAhead - 1);\n      if (index + RowsIn::kAhead * row_step < count) RowsIn::sent();",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks into the place of the present row",
        "rows_in.prefetch(which_rows.of(index + RowsIn::kAhead * row_step), RowsIn::kAhead - 1);",
        "rows_in.prefetch(which_rows.of(index + RowsIn::kAhead * row_step), RowsIn::kAhead);",
        "CTA, read for each use",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks into the place of the present row, forward",
        "rows_s.prefetch(row + RowsS::kAhead * row_step, RowsS::kAhead - 1);",
        "rows_s.prefetch(row + RowsS::kAhead * row_step, RowsS::kAhead);",
        "cluster",
        (
            ("results", "y: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks for the same row again",
        "rows_in.prefetch(which_rows.of(index + RowsIn::kAhead * row_step), RowsIn::kAhead - 1);",
        "rows_in.prefetch(which_rows.of(index + (RowsIn::kAhead - 1) * row_step), RowsIn::kAhead - 1);",
        "buffers",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "the ring has no way back but to its first place",
        "buffer(iteration < kStages ? iteration : iteration - kStages)",
        "buffer(iteration < kStages ? iteration : 0)",
        "buffers",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "the ring has no end",
        "taken = taken == kStages - 1 ? 0 : taken + 1;",
        "taken = taken + 1;",
        "CTA",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "asks for a row more ahead than there are places",
        "kInPlace ? 1 : kStages - 1 + (kRowsInRegisters && kAlone);",
        "kInPlace ? 1 : kStages + (kRowsInRegisters && kAlone);",
        "CTA",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "asks for a row too few at first",
        "for (int ahead = 0; ahead < RowsIn::kAhead; ++ahead) {",
        "for (int ahead = 0; ahead < RowsIn::kAhead - 1; ++ahead) {",
        "CTA",
        (("results", "elements are wrong"),),
    ),
    Mutation(
        "a place too few",
        "static constexpr int kBuffers = kStages * kRows;",
        "static constexpr int kBuffers = (kStages - 1) * kRows;",
        "CTA, read for each use",
        (
            ("results", "elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "rows of a CTA share places",
        "return stage * kRows + row_group;",
        "return stage * kRows;",
        "groups of warps",
        (("races", "race:"),),  # a row that a thread keeps is read at once, here before another's copy is made
    ),
    Mutation(
        "vectors beyond the row are not cleared",
        "load.template clear<Shape::kCapacity, kBuffers>(buffers(), buffer(stage), Shape::vector_slot(p));",
        ";",
        "idle threads",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "vectors beyond the row are cleared in the first place alone",
        "for (int stage = 0; stage < kStages; ++stage)",
        "for (int stage = 0; stage < 1; ++stage)",
        "buffers",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "places as long as the whole row",
        "kFetch>(buffers(), to, Shape::vector_slot(p), row,",
        "kFetch>(buffers(), to, VectorSlot{Shape::vector_slot(p).thread, "
        "Shape::kCluster * Shape::vector_slot(p).run}, row,",
        "cluster",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "the weight lies where dy does",
        "dynamic_shared() + RowsIn::kBytes;",
        "dynamic_shared();",
        "cluster",
        (
            ("results", "dx: .* elements are wrong"),
            ("races", "race: .* while a copy to it is under way"),
        ),
    ),
    Mutation(
        "the weight beyond the row is not cleared",
        "columns.template clear<Shape::kCapacity, kRows>(column_buffers, row_group, Shape::vector_slot(p));",
        ";",
        "cluster",
        (("results", "dx: .* elements are wrong"),),
    ),
    Mutation(
        "rows of a CTA share the place of the weight",
        "(column_buffers, row_group,",
        "(column_buffers, 0,",
        "wide weight",
        (("races", "race:"),),
    ),
    Mutation(
        "the weight lies beyond its place",
        "Fetch::kCached>(column_buffers, row_group, Shape::vector_slot(p),",
        "Fetch::kCached>(column_buffers, row_group, "
        "VectorSlot{threadIdx.x, Shape::kCluster * Shape::vector_slot(p).run},",
        "cluster",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a row that is not there is read",
        "if (Shape::kThreads < 32 && !active) vector = {};",
        "",
        "lanes",
        (("results", "dweight: .* elements are wrong"),),
    ),
    Mutation(
        "vectors copied where the address does not allow them",
        "if constexpr (!kAligned) {\n      copy_covering",
        "if constexpr (false) {\n      copy_covering",
        "misplaced",
        (("results", "misaligned vector access"),),
    ),
    # Bounds
    Mutation(
        "whole vectors beyond the row",
        "return left > 0 ? kVectorSize : 0;",
        "return kVectorSize;",
        "idle threads",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "vectors beyond the row are said to be whole",
        "(p + 1) * kStep <= kCols; }",
        "p * kStep < kCols; }",
        "idle threads",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a vector is loaded that is not there, or a part of it",
        "row, column * kSize, valid * kSize,",
        "row, column * kSize, kVectorSize * kSize,",
        "one odd row",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "a vector in which a row ends is taken for a whole one",
        "Access::kAligned, Cache::",
        "Access::kWhole, Cache::",
        "one odd row",
        (("memory", "AddressSanitizer: heap-buffer-overflow"),),
    ),
    Mutation(
        "what lies behind the part of a vector that is there",
        "keep_valid<kAccess>(vector, covering.words, valid > 0 ? valid : kVectorSize);",
        "keep_valid<kAccess>(vector, covering.words, kVectorSize);",
        "one odd row",
        (("results", "nan"),),
    ),
)
