"""The Triton kernels of ``rotary``: a program has a row of all query and key heads, or a backward several rows."""

from __future__ import annotations

from narrowgauge.kernels import HAVE_TRITON, jit, jit_unspecialized

if HAVE_TRITON:
    import triton.language as tl


@jit
def _find_columns(number, R: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the two columns that are rotated together: neighbours, or one of each half."""
    if PAIRS:
        return 2 * number, 2 * number + 1
    else:
        return number, R // 2 + number


@jit
def _load_weights(  # type: ignore[no-untyped-def]
    q_weight, k_weight, head, column, inside, here, H: tl.constexpr, S: tl.constexpr, ALL: tl.constexpr
):
    """Load the norms' weights of some columns of each head: the same for all, or with ``ALL`` those of each."""
    is_q = head < H
    if ALL:
        of_q = tl.load(q_weight + head * S + column, inside & is_q, 0.0)
        return of_q + tl.load(k_weight + (head - H) * S + column, inside & here & (head >= H), 0.0)
    else:
        return tl.where(is_q, tl.load(q_weight + column, inside, 0.0), tl.load(k_weight + column, inside, 0.0))


@jit
def _divide_by_columns(  # type: ignore[no-untyped-def]
    total, H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr
):
    """Return the mean of each head from the sums of its columns; with ``ALL`` that of all query or key heads."""
    if ALL:
        is_q = tl.arange(0, HEADS) < H
        of_q = tl.sum(tl.where(is_q, total, 0.0), 0) / (H * S)
        of_k = tl.sum(tl.where(is_q, 0.0, total), 0) / (K * S)
        return tl.where(is_q, of_q, of_k)
    else:
        return total / S


@jit_unspecialized("length")
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, q_weight, k_weight, out_ptr, rstd_ptr, length, stride, out_stride, angle_stride, eps,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    here = head < H + K
    angle = (row // length) * angle_stride + (row % length) * R
    number = tl.arange(0, HALF)[None, :]
    inside = number < R // 2
    first, second = _find_columns(number, R, PAIRS)
    both = here & inside
    source = x_ptr + row * stride + head * S
    left = tl.load(source + first, both, 0.0).to(tl.float32)
    right = tl.load(source + second, both, 0.0).to(tl.float32)
    j = R + tl.arange(0, REST)[None, :]
    if R < S:
        rest = tl.load(source + j, here & (j < S), 0.0).to(tl.float32)
    if rstd_ptr is not None:
        total = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if R < S:
            total += tl.sum(rest * rest, 1)
        rstd = 1.0 / tl.sqrt(_divide_by_columns(total, H, K, S, HEADS, ALL) + eps)
        tl.store(rstd_ptr + row * (H + K) + tl.arange(0, HEADS), rstd, tl.arange(0, HEADS) < H + K)
        rstd = rstd[:, None]
        left *= rstd * _load_weights(q_weight, k_weight, head, first, inside, here, H, S, ALL)
        right *= rstd * _load_weights(q_weight, k_weight, head, second, inside, here, H, S, ALL)
        if R < S:
            rest *= rstd * _load_weights(q_weight, k_weight, head, j, j < S, here, H, S, ALL)
    cos_left = tl.load(cos_ptr + angle + first, inside, 0.0).to(tl.float32)
    cos_right = tl.load(cos_ptr + angle + second, inside, 0.0).to(tl.float32)
    sin_left = tl.load(sin_ptr + angle + first, inside, 0.0).to(tl.float32)
    sin_right = tl.load(sin_ptr + angle + second, inside, 0.0).to(tl.float32)
    target = out_ptr + row * out_stride + head * S
    if IN_PLACE:
        tl.debug_barrier()  # no thread stores before all have loaded
    tl.store(target + first, left * cos_left - right * sin_left, both)
    tl.store(target + second, right * cos_right + left * sin_right, both)
    if R < S:
        tl.store(target + j, rest, here & (j < S))


@jit_unspecialized("rows", "length")
def backward_kernel(  # type: ignore[no-untyped-def]
    dq_ptr, dk_ptr, x_ptr, cos_ptr, sin_ptr, q_weight, k_weight, rstd_ptr, out_ptr, partial_ptr, rows, length,
    q_batch, q_head, q_time, k_batch, k_head, k_time, stride, angle_stride,
    H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None]
    here, is_q = head < H + K, head < H
    number = tl.arange(0, HALF)[None, :]
    inside = number < R // 2
    first, second = _find_columns(number, R, PAIRS)
    both = here & inside
    j = R + tl.arange(0, REST)[None, :]
    tail = here & (j < S)
    if rstd_ptr is not None:
        w_left = _load_weights(q_weight, k_weight, head, first, inside, here, H, S, ALL).to(tl.float32)
        w_right = _load_weights(q_weight, k_weight, head, second, inside, here, H, S, ALL).to(tl.float32)
        w_rest = _load_weights(q_weight, k_weight, head, j, j < S, here, H, S, ALL).to(tl.float32)
        sum_left = tl.zeros((HEADS, HALF), tl.float32)
        sum_right = tl.zeros((HEADS, HALF), tl.float32)
        sum_rest = tl.zeros((HEADS, REST), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        batch, time = (row // length).to(tl.int64), (row % length).to(tl.int64)
        angle = batch * angle_stride + time * R
        q_source = dq_ptr + batch * q_batch + time * q_time + head * q_head
        k_source = dk_ptr + batch * k_batch + time * k_time + (head - H) * k_head
        source = tl.where(is_q, q_source, k_source)
        left = tl.load(source + first, both, 0.0).to(tl.float32)
        right = tl.load(source + second, both, 0.0).to(tl.float32)
        cos_left = tl.load(cos_ptr + angle + first, inside, 0.0).to(tl.float32)
        cos_right = tl.load(cos_ptr + angle + second, inside, 0.0).to(tl.float32)
        sin_left = tl.load(sin_ptr + angle + first, inside, 0.0).to(tl.float32)
        sin_right = tl.load(sin_ptr + angle + second, inside, 0.0).to(tl.float32)
        d_left = left * cos_left + right * sin_right
        d_right = right * cos_right - left * sin_left
        if R < S:
            d_rest = tl.load(source + j, tail, 0.0).to(tl.float32)
        if rstd_ptr is not None:
            at = x_ptr + tl.cast(row, tl.int64) * stride + head * S
            rstd = tl.load(rstd_ptr + row * (H + K) + head, here, 0.0)
            x_left = tl.load(at + first, both, 0.0).to(tl.float32) * rstd
            x_right = tl.load(at + second, both, 0.0).to(tl.float32) * rstd
            sum_left += d_left * x_left
            sum_right += d_right * x_right
            d_left *= w_left
            d_right *= w_right
            dot = tl.sum(d_left * x_left, 1) + tl.sum(d_right * x_right, 1)
            if R < S:
                x_rest = tl.load(at + j, tail, 0.0).to(tl.float32) * rstd
                sum_rest += d_rest * x_rest
                d_rest *= w_rest
                dot += tl.sum(d_rest * x_rest, 1)
            mean = _divide_by_columns(dot, H, K, S, HEADS, ALL)[:, None]
            d_left = (d_left - x_left * mean) * rstd
            d_right = (d_right - x_right * mean) * rstd
            if R < S:
                d_rest = (d_rest - x_rest * mean) * rstd
        target = out_ptr + tl.cast(row, tl.int64) * (H + K) * S + head * S
        tl.store(target + first, d_left, both)
        tl.store(target + second, d_right, both)
        if R < S:
            tl.store(target + j, d_rest, tail)
    if rstd_ptr is not None and ALL:
        total = partial_ptr + tl.program_id(0) * (H + K) * S + head * S
        tl.store(total + first, sum_left, both)
        tl.store(total + second, sum_right, both)
        if R < S:
            tl.store(total + j, sum_rest, tail)
    elif rstd_ptr is not None:
        flat = tl.arange(0, HALF)
        flat_first, flat_second = _find_columns(flat, R, PAIRS)
        end = R + tl.arange(0, REST)
        for part in tl.static_range(2):
            mine = is_q if part == 0 else (here & (head >= H))
            total = partial_ptr + (tl.program_id(0) * 2 + part) * S
            tl.store(total + flat_first, tl.sum(tl.where(mine, sum_left, 0.0), 0), flat < R // 2)
            tl.store(total + flat_second, tl.sum(tl.where(mine, sum_right, 0.0), 0), flat < R // 2)
            if R < S:
                tl.store(total + end, tl.sum(tl.where(mine, sum_rest, 0.0), 0), end < S)
