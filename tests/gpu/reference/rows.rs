//! Twins of the kernels that work row by row: rms_norm, rope, glu, half_rows, int8_rows, top_logits.

/// One row: s / sqrt(mean(s^2) + eps) * weight.
pub(crate) fn rms_norm(row: &[f32], weight: Option<&[f32]>, eps: f32) -> Vec<f64> {
    let mean = row.iter().map(|&s| f64::from(s) * f64::from(s)).sum::<f64>() / row.len() as f64;
    let norm = 1.0 / (mean + f64::from(eps)).sqrt();
    let weight = |i: usize| weight.map_or(1.0, |w| f64::from(w[i]));
    row.iter().enumerate().map(|(i, &s)| f64::from(s) * norm * weight(i)).collect()
}

/// Where the two elements of a rotating pair are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pairing {
    /// 2i, 2i + 1
    Adjacent,
    /// i, i + n_rot / 2
    Halves,
}

/// One head, from dimension `offset` on; the angle is an f32 product.
pub(crate) fn rope(
    head: &[f32],
    freqs: &[f32],
    offset: usize,
    pairing: Pairing,
    position: u32,
    mscale: f32,
) -> Vec<f64> {
    let mut out: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
    for (i, &freq) in freqs.iter().enumerate() {
        let (a, b) = match pairing {
            Pairing::Adjacent => (offset + 2 * i, offset + 2 * i + 1),
            Pairing::Halves => (offset + i, offset + i + freqs.len()),
        };
        let (sin, cos) = f64::from(position as f32 * freq).sin_cos();
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        out[a] = (x * cos - y * sin) * f64::from(mscale);
        out[b] = (x * sin + y * cos) * f64::from(mscale);
    }
    out
}

/// One element; `op` as in shaders/include/glu.glsl.
pub(crate) fn glu(op: u32, gate: f32, up: f32, alpha: f32, limit: f32) -> f64 {
    let (g, u) = (f64::from(gate), f64::from(up));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match op {
        0 => g * sigmoid(g) * u,
        1 => {
            let z = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
            g * sigmoid(2.0 * z) * u // 0.5 (1 + tanh z) = sigmoid(2 z)
        }
        2 => g.max(0.0) * u,
        _ => {
            let limit = f64::from(limit);
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            g * sigmoid(f64::from(alpha) * g) * (u + 1.0)
        }
    }
}

/// A row times a power of two that brings its largest magnitude into [2^14, 2^15), and what undoes it.
pub(crate) fn half_rows(row: &[f32]) -> (Vec<f64>, f32) {
    let most = row.iter().fold(0f64, |most, &x| most.max(f64::from(x).abs()));
    let scale = 2f64.powi(14 - most.log2().floor() as i32);
    (row.iter().map(|&x| f64::from(x) * scale).collect(), (1.0 / scale) as f32)
}

/// 32 values as multiples of the 127th part of the largest magnitude, and that part.
pub(crate) fn int8_rows(block: &[f32]) -> (Vec<f64>, f64) {
    let most = block.iter().fold(0f64, |most, &x| most.max(f64::from(x).abs()));
    let scale = most / 127.0;
    (block.iter().map(|&x| if most > 0.0 { f64::from(x) / scale } else { 0.0 }).collect(), scale)
}

/// The k largest of a row and where they are; `None` where the row has too few numbers.
pub(crate) fn top_logits(row: &[f32], k: usize) -> Vec<Option<(u32, f32)>> {
    let mut order: Vec<usize> = (0..row.len()).filter(|&i| !row[i].is_nan()).collect();
    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
    (0..k).map(|place| order.get(place).map(|&i| (i as u32, row[i]))).collect()
}
