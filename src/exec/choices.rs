//! Which kernels and sizes a device gets, as a table for people: the answers of [`Tuning`] to the
//! questions that `lower` asks it, for shapes of each class. Pure.

use super::attention::AttentionShape;
use super::kv::KvType;
use super::mat_vec::Activations;
use super::matrix::MatrixTile;
use super::tuning::{MulMatTile, Tuning};
use crate::gguf::GgmlType;
use crate::graph::{Weight, WeightId};
use crate::push::MulMatVec;

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What is computed.
    pub op: &'static str,
    /// Rows of x, tokens, or pairs for which it is so.
    pub rows: String,
    /// Shader.
    pub kernel: String,
    /// Weight rows × rows of x × depth, and how they are shared out.
    pub tile: String,
    /// Invocations.
    pub workgroup: u32,
    /// Why this one.
    pub why: String,
}

/// Weight rows of a large matrix, and rows of x that go with it.
const LARGE: (u32, u32) = (4096, 2048);
const SMALL: (u32, u32) = (512, 64);
/// Type that most weights have.
const TYPE: GgmlType = GgmlType::Q4_K;
/// Rows of x of an expert.
const PER_EXPERT: [u32; 2] = [32, 256];
/// Head size and heads that share keys.
const HEAD: u32 = 128;
const HEADS: u32 = 8;

/// The table.
pub fn choices(t: &Tuning) -> Vec<Choice> {
    let mut rows = vec![dense(t, LARGE), dense(t, SMALL)];
    rows.extend(PER_EXPERT.map(|per_expert| grouped(t, per_expert)));
    rows.push(float(t));
    rows.extend(few(t));
    rows.extend([1, 512].map(|n_tokens| attention(t, n_tokens)));
    // Classes that a device does not tell apart are one row.
    rows.dedup_by(|b, a| {
        let same = (a.op, &a.kernel, &a.tile) == (b.op, &b.kernel, &b.tile);
        if same {
            a.rows = format!("{}, {}", a.rows, b.rows);
        }
        same
    });
    rows
}

fn matrix_tile(t: MatrixTile) -> String {
    let MatrixTile { bm, bn, bk, warps_m, warps_n, stages } = t;
    format!("{bm}×{bn}×{bk}, {warps_m}×{warps_n} subgroups, {stages} buffers")
}

fn plain_tile(t: MulMatTile) -> String {
    format!("{}×{}×{}, {}×{} an invocation", t.bm, t.bn, t.bk, t.tm, t.tn)
}

/// Products of many rows of x, by what they run on.
fn product(
    t: &Tuning,
    op: &'static str,
    rows: String,
    matrix: Option<MatrixTile>,
    [int8, plain]: [MulMatTile; 2],
) -> Choice {
    let why = t.units_why.to_owned();
    if let (Some(units), Some(tile)) = (t.matrix, matrix) {
        let [m, n, k] = units.shape;
        let (kernel, workgroup) = ("mul_mat_cm".to_owned(), units.local_size(tile));
        let why = format!("{why}, {m}×{n}×{k}");
        return Choice { op, rows, kernel, tile: matrix_tile(tile), workgroup, why };
    }
    let (kernel, tile) = match t.int8 {
        Some(_) => ("mul_mat_int8", int8),
        None => ("mul_mat", plain),
    };
    let (kernel, workgroup) = (kernel.to_owned(), tile.invocations());
    Choice { op, rows, kernel, tile: plain_tile(tile), workgroup, why }
}

fn dense(t: &Tuning, (n, m): (u32, u32)) -> Choice {
    let plain = t.mul_mat_dense(n, m);
    let int8 = t.int8.map_or(plain, |int8| int8.dense(n, m));
    let matrix = t.matrix.and_then(|units| units.dense(n, m, false));
    product(t, "product", format!("{m} ({n} weight rows)"), matrix, [int8, plain])
}

fn grouped(t: &Tuning, per_expert: u32) -> Choice {
    let int8 = t.int8.map_or(t.mul_mat, |int8| int8.tile);
    let width = t.group_tile(per_expert);
    let matrix = t.matrix.and_then(|units| units.grouped(width, false));
    let rows = format!("{per_expert} an expert");
    let mut choice = product(t, "product by expert", rows, matrix, [int8, t.mul_mat]);
    choice.why += &format!("; from {} tokens on", t.group_from);
    choice
}

/// Weights in f32 always have f32 products: routers.
fn float(t: &Tuning) -> Choice {
    let tile = t.mul_mat_dense(HEAD, LARGE.1);
    Choice {
        op: "product of f32 weights",
        rows: "many".into(),
        kernel: "mul_mat".into(),
        tile: plain_tile(tile),
        workgroup: tile.invocations(),
        why: "routers: rounding would change their choice".into(),
    }
}

/// Products of few rows of x, whose speed is that of memory.
fn few(t: &Tuning) -> Vec<Choice> {
    let choice = |m: u32| {
        let w = Weight { id: WeightId(0), ty: TYPE, k: LARGE.0, n: LARGE.0, n_expert: 1 };
        let v = t.mat_vec.dense(w, m);
        Choice {
            op: "product",
            rows: if m == 1 { "1, or 1 an expert".into() } else { format!("up to {m}") },
            kernel: v.kernel::<MulMatVec>(TYPE, &[]).module,
            tile: format!("{} × {} rows a subgroup, {} loads ahead", v.rows, v.cols, v.units),
            workgroup: v.local,
            why: match v.activations {
                Activations::F32 => format!("as fast as weights are read, here {TYPE}"),
                Activations::Int16 => {
                    format!("integers of 16 bits with {TYPE}, by packed dot products")
                }
            },
        }
    };
    [1, t.mat_vec_max()].into_iter().map(choice).collect()
}

fn attention(t: &Tuning, n_tokens: u32) -> Choice {
    let shape = AttentionShape { head_k: HEAD, head_v: HEAD, rows: n_tokens * HEADS };
    let rows = format!("tokens: {n_tokens} (heads of {HEAD}, cache f16)");
    let few = t.decode_attention.tile(shape, n_tokens, true).filter(|_| n_tokens == 1);
    if let Some(v) = few {
        return Choice {
            op: "attention",
            rows,
            kernel: "flash_decode".into(),
            tile: format!("{} rows, a subgroup each, {} keys ahead", v.rows, v.keys),
            workgroup: v.local,
            why: "as fast as the cache is read".into(),
        };
    }
    let tile = t.attention(shape, KvType::F16, KvType::F16);
    let (kernel, why) = match (tile.matrix, t.attention_units) {
        (Some(_), _) => ("flash_attn_cm", "matrix units for f16"),
        (None, Some(_)) => ("flash_attn", "too few rows for matrix units"),
        (None, None) => ("flash_attn", t.units_why),
    };
    Choice {
        op: "attention",
        rows,
        kernel: kernel.into(),
        tile: tile.to_string(),
        workgroup: tile.local_size,
        why: why.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::int8::Int8Products;
    use crate::exec::matrix::MatrixUnits;
    use crate::vk::DeviceInfo;

    fn kernels(change: impl Fn(&mut Tuning, &DeviceInfo)) -> Vec<String> {
        let mut info = DeviceInfo::default();
        info.subgroup.default = 32;
        info.limits.shared_bytes = 48 << 10;
        info.limits.workgroup_invocations = 1024;
        info.optional.integer_dot_product = true;
        let mut tuning = Tuning::new(&info);
        (tuning.matrix, tuning.int8) = (None, None);
        change(&mut tuning, &info);
        let found = choices(&tuning);
        assert!(found.iter().all(|c| c.workgroup > 0 && !c.tile.is_empty()), "{found:?}");
        found.into_iter().filter(|c| c.op.ends_with("expert")).map(|c| c.kernel).collect()
    }

    #[test]
    fn the_table_follows_the_tuning() {
        assert!(kernels(|_, _| {}).iter().all(|kernel| kernel == "mul_mat"));
        let int8 = kernels(|t, info| t.int8 = Int8Products::new(info));
        assert!(int8.iter().all(|kernel| kernel == "mul_mat_int8"));
        let units = MatrixUnits::made_up([16, 16, 16], 32, 48 << 10);
        let matrix = kernels(|t, _| t.matrix = Some(units));
        assert!(matrix.iter().all(|kernel| kernel == "mul_mat_cm"));
    }
}
