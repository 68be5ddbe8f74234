//! Matrix products.

/// w: [n][k], x: [k], bias: [n] or empty. Each result with the sum of the magnitudes that went into it,
/// by which its error is measured.
pub(crate) fn mul_mat_row(w: &[f32], x: &[f32], bias: &[f32]) -> Vec<Sum> {
    let row = |(r, w): (usize, &[f32])| {
        let mut sum = Sum::default();
        sum.add(bias.get(r).map_or(0.0, |&b| f64::from(b)));
        w.iter().zip(x).for_each(|(&w, &x)| sum.add(f64::from(w) * f64::from(x)));
        sum
    };
    w.chunks_exact(x.len()).enumerate().map(row).collect()
}

/// A sum and that of the magnitudes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) value: f64,
    pub(crate) magnitude: f64,
}

impl Sum {
    pub(crate) fn scaled(self, factor: f64) -> Self {
        Sum { value: self.value * factor, magnitude: self.magnitude * factor }
    }

    fn add(&mut self, term: f64) {
        self.value += term;
        self.magnitude += term.abs();
    }
}

/// Panics unless each element is right to `tolerance` times its magnitude.
pub(crate) fn assert_close(what: &str, found: &[f32], expected: &[Sum], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&f, e)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(f) - e.value).abs();
        let good = error <= tolerance * e.magnitude;
        assert!(good, "{what}[{i}]: {f} is not {} (sum of magnitudes {})", e.value, e.magnitude);
    }
}
