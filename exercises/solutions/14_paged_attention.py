@triton.jit
def my_paged_attention(
    q_ptr,  # [T, H, D], contiguous, as all are
    keys_ptr,  # [N, K, P, D]
    values_ptr,  # [N, K, P, D]
    block_table_ptr,  # [R, B]
    row_ptr,  # [T]: the row of each query
    position_ptr,  # [T]: and its position there
    out_ptr,  # [T, H, D]
    table_len,  # B
    scale,  # 1 / sqrt(D)
    GROUP: tl.constexpr,  # H / K
    HEAD_DIM: tl.constexpr,  # D
    BLOCK_SIZE: tl.constexpr,  # P
    TILE_DIM: tl.constexpr,  # D, rounded up to a power of two
):
    token, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    kv_head, num_kv_heads = head // GROUP, num_heads // GROUP
    table_ptr = block_table_ptr + tl.load(row_ptr + token) * table_len
    position = tl.load(position_ptr + token)
    dim_D = tl.arange(0, TILE_DIM)
    place_P = tl.arange(0, BLOCK_SIZE)
    vector = (token * num_heads + head) * HEAD_DIM
    q_D = tl.load(q_ptr + vector + dim_D, mask=dim_D < HEAD_DIM, other=0.0)

    greatest = -1e30
    total = 0.0
    acc_D = tl.zeros([TILE_DIM], tl.float32)
    for index in range(position // BLOCK_SIZE + 1):
        block = tl.load(table_ptr + index).to(tl.int64)
        is_key_P = index * BLOCK_SIZE + place_P <= position
        mask_PD = is_key_P[:, None] & (dim_D < HEAD_DIM)[None, :]
        offset_P = ((block * num_kv_heads + kv_head) * BLOCK_SIZE + place_P) * HEAD_DIM
        offset_PD = offset_P[:, None] + dim_D[None, :]
        k_PD = tl.load(keys_ptr + offset_PD, mask=mask_PD, other=0.0)
        v_PD = tl.load(values_ptr + offset_PD, mask=mask_PD, other=0.0)
        score_P = tl.sum(k_PD * q_D[None, :], axis=1) * scale
        score_P = tl.where(is_key_P, score_P, -float("inf"))
        new_greatest = tl.maximum(greatest, tl.max(score_P, axis=0))
        rescale = tl.exp(greatest - new_greatest)
        weight_P = tl.exp(score_P - new_greatest)
        total = total * rescale + tl.sum(weight_P, axis=0)
        acc_D = acc_D * rescale + tl.sum(v_PD * weight_P[:, None], axis=0)
        greatest = new_greatest
    tl.store(out_ptr + vector + dim_D, acc_D / total, mask=dim_D < HEAD_DIM)
