//! Plain-text tables. Colours in cells take no room.

use console::measure_text_width;

/// Columns of left- or right-aligned text, separated by two spaces.
pub(super) struct Table {
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// `header`: titles; those that begin with `>` head right-aligned columns.
    pub(super) fn new(header: &[&str]) -> Self {
        let right = header.iter().map(|h| h.starts_with('>')).collect();
        let titles = header.iter().map(|h| h.trim_start_matches('>').to_string()).collect();
        Table { right, rows: vec![titles] }
    }

    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|r| r.get(column));
            cells.map(|c| measure_text_width(c)).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.right.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, &right), &width) in row.iter().zip(&self.right).zip(&widths) {
                let padding = " ".repeat(width - measure_text_width(cell));
                line += &if right { padding + cell } else { cell.clone() + &padding };
                line += "  ";
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let mut table = Table::new(&["name", ">bytes"]);
        table.row(["a".into(), "1".into()]);
        table.row(["läng".into(), "12345".into()]);
        table.row(["\x1b[34m█\x1b[0m".into(), "2".into()]);
        let blue = "\x1b[34m█\x1b[0m         2\n";
        assert_eq!(table.to_string(), format!("name  bytes\na         1\nläng  12345\n{blue}"));
    }
}
