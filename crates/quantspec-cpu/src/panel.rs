//! What the kernels of all weight formats share: matrices in panels of outputs, and rows in groups.

/// Outputs of a panel.
pub(crate) const PANEL: usize = 32;

/// Splits m rows into groups of at most `most`, as even as possible: (first row, rows).
pub(crate) fn groups(m: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = m.div_ceil(most);
    (0..count).map(move |i| {
        let (first, end) = (m * i / count, m * (i + 1) / count);
        (first, end - first)
    })
}
