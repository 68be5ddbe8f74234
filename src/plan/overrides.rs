//! `--override-tensor REGEX=HOST|VRAM[,REGEX=…]`: where tensors of certain names go.
//!
//! As in llama.cpp an expression may match anywhere in the name, and the first rule that matches
//! decides. Its buffer names are understood, so that command lines can be taken over.

use super::Place;
use regex::Regex;
use std::fmt;
use std::str::FromStr;

/// One rule.
#[derive(Clone, Debug)]
pub struct Override {
    pattern: Regex,
    /// Where the tensors go.
    pub place: Place,
}

impl Override {
    /// Whether a tensor of that name falls under the rule.
    pub fn matches(&self, name: &str) -> bool {
        self.pattern.is_match(name)
    }
}

impl PartialEq for Override {
    fn eq(&self, other: &Self) -> bool {
        (self.pattern.as_str(), self.place) == (other.pattern.as_str(), other.place)
    }
}

impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.place.name())
    }
}

/// Rules in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides(pub Vec<Override>);

impl Overrides {
    /// Where the first rule that matches puts a tensor.
    pub fn place(&self, name: &str) -> Option<Place> {
        self.0.iter().find(|rule| rule.matches(name)).map(|rule| rule.place)
    }

    /// Rules under which none of the names falls.
    pub fn unmatched<'a>(&'a self, names: &[&str]) -> Vec<&'a Override> {
        self.0.iter().filter(|rule| !names.iter().any(|name| rule.matches(name))).collect()
    }
}

impl fmt::Display for Overrides {
    /// With `;` between rules, as llama-bench has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, rule) in self.0.iter().enumerate() {
            write!(f, "{}{rule}", if i > 0 { ";" } else { "" })?;
        }
        Ok(())
    }
}

impl FromStr for Overrides {
    type Err = String;

    /// Parses `REGEX=PLACE[,REGEX=PLACE…]`. A comma before the `=` belongs to the expression, as in
    /// `blk\.1{1,2}\.=HOST`; so does any `=` but the last.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut rules = Vec::new();
        let mut open = String::new();
        for part in text.split(',') {
            open += part;
            match open.rsplit_once('=') {
                Some((pattern, place)) => rules.push(rule(pattern, place)?),
                None => {
                    open.push(',');
                    continue;
                }
            }
            open.clear();
        }
        if open.is_empty() { Ok(Overrides(rules)) } else { Err(shape(open.trim_end_matches(','))) }
    }
}

fn rule(pattern: &str, place: &str) -> Result<Override, String> {
    if pattern.is_empty() {
        return Err(shape(&format!("={place}")));
    }
    let place = place_named(place).ok_or_else(|| {
        format!(
            "`{place}` is no place; HOST and VRAM are, and llama.cpp's names: CPU, …_Host, Vulkan0, \
             CUDA0, ROCm0, GPU"
        )
    })?;
    let pattern = Regex::new(pattern).map_err(|e| format!("`{pattern}`: {}", reason(&e)))?;
    Ok(Override { pattern, place })
}

fn shape(text: &str) -> String {
    format!("`{text}` is no rule; write REGEX=HOST or REGEX=VRAM")
}

/// Our names and llama.cpp's, in any case. There is one device: its number does not matter.
fn place_named(name: &str) -> Option<Place> {
    let name = name.trim().to_lowercase();
    let device = name.trim_end_matches(|c: char| c.is_ascii_digit());
    match device {
        _ if name == "host" || name == "cpu" || name.ends_with("_host") => Some(Place::Host),
        "vram" | "gpu" | "vulkan" | "cuda" | "rocm" | "sycl" => Some(Place::Device),
        _ => None,
    }
}

/// The last line of the crate's message; those before it draw the expression.
fn reason(e: &regex::Error) -> String {
    let text = e.to_string();
    let last = text.lines().last().unwrap_or_default();
    last.trim_start_matches("error: ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Result<Vec<String>, String> {
        let parsed: Overrides = text.parse()?;
        Ok(parsed.0.iter().map(Override::to_string).collect())
    }

    #[test]
    fn rules_are_split_at_the_right_commas() {
        assert_eq!(rules("a=HOST"), Ok(vec!["a=HOST".into()]));
        assert_eq!(rules("a=CPU,b=Vulkan0"), Ok(vec!["a=HOST".into(), "b=VRAM".into()]));
        let inside = rules(r"blk\.1{1,2}\.=CPU,x=y=gpu");
        assert_eq!(inside, Ok(vec![r"blk\.1{1,2}\.=HOST".into(), "x=y=VRAM".into()]));
    }

    #[test]
    fn places_have_llama_cpps_names() {
        let host = ["HOST", "host", "CPU", "CUDA_Host", "Vulkan_Host", "ROCm_Host"];
        assert!(host.iter().all(|name| place_named(name) == Some(Place::Host)));
        let vram = ["VRAM", "vram", "GPU", "Vulkan0", "CUDA0", "CUDA12", "ROCm0"];
        assert!(vram.iter().all(|name| place_named(name) == Some(Place::Device)));
        assert!(["", "disk", "0", "CPU0", "Host1"].iter().all(|n| place_named(n).is_none()));
    }

    #[test]
    fn what_is_no_rule_is_named_in_one_line() {
        let cases = [
            ("", "``"),
            ("exps", "`exps`"),
            ("=HOST", "`=HOST`"),
            ("a=HOST,", "``"),
            ("a=HOST,b", "`b`"),
            ("a=disk", "`disk`"),
            ("a=", "``"),
            ("blk(=HOST", "unclosed group"),
            ("(?!a)=HOST", "look-around"),
        ];
        for (text, word) in cases {
            let refused = rules(text).unwrap_err();
            assert!(refused.contains(word) && !refused.contains('\n'), "{text}: {refused}");
        }
    }

    #[test]
    fn the_first_match_wins_and_matches_anywhere() -> Result<(), String> {
        let rules: Overrides = "blk.7=VRAM,_exps=HOST,nothing=HOST,blk=VRAM".parse()?;
        assert_eq!(rules.place("blk.7.ffn_up_exps.weight"), Some(Place::Device));
        assert_eq!(rules.place("blk.8.ffn_up_exps.weight"), Some(Place::Host));
        assert_eq!(rules.place("blk.8.attn_q.weight"), Some(Place::Device));
        assert_eq!(rules.place("output.weight"), None);
        let unmatched = rules.unmatched(&["blk.7.ffn_up_exps.weight", "output.weight"]);
        assert_eq!(unmatched.iter().map(ToString::to_string).collect::<Vec<_>>(), ["nothing=HOST"]);
        Ok(())
    }
}
