//! Lists that live in several places agree, and rules that no compiler checks hold.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use vkmoe::model::weights::SUPPORTED_TYPES;
use vkmoe::push;

/// Where `unsafe` may be written.
const UNSAFE: [&str; 2] = ["src/vk/", "src/gguf/mapping.rs"];
const MAX_LINES: usize = 700;
const MAX_SPIRV_BYTES: u64 = 5 << 20;

/// Names without ending of a folder's files with that ending.
fn stems(folder: &str, ending: &str) -> BTreeSet<String> {
    let files = fs::read_dir(folder).unwrap_or_else(|e| panic!("{folder}: {e}"));
    let names = files.map(|f| f.unwrap().file_name().into_string().unwrap());
    names.filter_map(|n| n.strip_suffix(ending).map(str::to_owned)).collect()
}

/// The first word of each line of `shaders/permutations`.
fn permutations() -> BTreeSet<String> {
    let text = fs::read_to_string("shaders/permutations").unwrap();
    let lines = text.lines().filter(|l| !l.starts_with('#') && !l.trim().is_empty());
    lines.map(|l| l.split_whitespace().next().unwrap().to_owned()).collect()
}

/// All files below a folder with that ending, in order.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.to_string_lossy().ends_with(ending) => found.push(path),
                false => {}
            }
        }
    }
    found.sort();
    found
}

/// Asserts that nothing was found wrong, and lists what was.
fn none(problems: Vec<String>) {
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

#[test]
fn every_shader_source_is_listed_and_every_listed_one_is_there() {
    assert_eq!(permutations(), stems("shaders", ".comp"));
}

#[test]
fn the_quant_folder_holds_the_supported_types() {
    let supported = SUPPORTED_TYPES.iter().map(|ty| ty.name().to_lowercase());
    assert_eq!(supported.collect::<BTreeSet<_>>(), stems("shaders/quant", ".glsl"));
}

#[test]
fn modules_files_and_push_structs_agree() {
    let names: BTreeSet<String> = push::module_names().map(str::to_owned).collect();
    assert_eq!(names, stems("shaders/spirv", ".spv"));
    let sources: BTreeSet<String> =
        names.iter().map(|n| n.split('.').next().unwrap().to_owned()).collect();
    assert_eq!(sources, permutations());
    let text = fs::read_to_string("src/push.rs").unwrap();
    let code = text.split_whitespace().collect::<Vec<_>>().join(" ");
    // `Glu = "glu" GLU {`: the struct's name, the shader, its generated layout.
    let without = |s: &&String| !code.contains(&format!("= \"{s}\" {} {{", s.to_uppercase()));
    none(sources.iter().filter(without).map(|s| format!("{s}: no push struct")).collect());
}

#[test]
fn the_shader_modules_stay_small() {
    let sizes = files("shaders/spirv", ".spv").into_iter().map(|f| f.metadata().unwrap().len());
    let total: u64 = sizes.sum();
    assert!(total < MAX_SPIRV_BYTES, "{total} bytes of SPIR-V");
}

/// Twins are grouped by what they compute, so that a test's use of one is what can be looked for.
#[test]
fn every_shader_has_a_test_with_a_twin() {
    let list = fs::read_to_string("tests/gpu/main.rs").unwrap();
    let has_test = |shader: &String| {
        let code = fs::read_to_string(format!("tests/gpu/{shader}.rs")).unwrap_or_default();
        code.contains("reference") && list.contains(&format!("mod {shader};"))
    };
    let without = permutations().into_iter().filter(|shader| !has_test(shader));
    none(without.map(|s| format!("{s}: no test with a twin in tests/gpu")).collect());
}

#[test]
fn unsafe_code_is_where_it_belongs() {
    let elsewhere = |path: &PathBuf| {
        let path = path.to_string_lossy();
        !UNSAFE.iter().any(|allowed| path.starts_with(allowed))
    };
    let has_unsafe = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "allow(unsafe_code"]
            .iter()
            .any(|word| code.contains(word))
    };
    let mut found = Vec::new();
    for path in files("src", ".rs").into_iter().filter(elsewhere) {
        for (i, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            if has_unsafe(line) {
                found.push(format!("{}:{}: {line}", path.display(), i + 1));
            }
        }
    }
    none(found);
}

#[test]
fn no_source_file_is_long() {
    let n_lines = |path: &PathBuf| fs::read_to_string(path).unwrap().lines().count();
    let long = files("src", ".rs").into_iter().map(|p| (n_lines(&p), p));
    let long = long.filter(|(n, _)| *n > MAX_LINES);
    none(long.map(|(n, p)| format!("{}: {n} lines", p.display())).collect());
}

/// Paths in the documents: code spans and link targets that begin with a folder of this repository, or
/// name one of its files.
#[test]
fn documents_mention_no_missing_files() {
    let roots = ["src/", "shaders/", "tests/", "benches/", "assets/", "fuzz/", "docs/", ".ci/"];
    let mut missing = Vec::new();
    let documents = stems(".", ".md").into_iter().map(|s| PathBuf::from(s + ".md"));
    for document in documents.chain(files("docs", ".md")) {
        let text = fs::read_to_string(&document).unwrap();
        for word in text.split(|c: char| c.is_whitespace() || "`()[]<>\"',;".contains(c)) {
            let path = word.split(['#', ':']).next().unwrap_or_default().trim_end_matches('.');
            // A pattern or a part of one is no path.
            let plain = !path.contains(['*', '{', '$', '…', '|']);
            if plain && roots.iter().any(|r| path.starts_with(r)) && !Path::new(path).exists() {
                missing.push(format!("{}: {path}", document.display()));
            }
        }
    }
    none(missing);
}
