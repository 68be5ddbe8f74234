//! Chat templates: what HF's Jinja offers, faults with their line, the built-in ones.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use serde_json::json;
use vkmoe::Error;
use vkmoe::tokenizer::{ChatTemplate, Message, TemplateArgs};

fn conversation() -> Vec<Message> {
    vec![
        Message::new("system", "Be kind."),
        Message::new("user", " Hi "),
        Message::new("assistant", "Hello"),
        Message::new("user", "Bye"),
    ]
}

fn args() -> TemplateArgs {
    TemplateArgs {
        add_generation_prompt: true,
        bos_token: "<s>".into(),
        eos_token: "</s>".into(),
        extra: serde_json::from_value(json!({
            "tools": [{"name": "f", "z": [1, 2.5, true, null], "a": {}, "é": "<&'\""}],
        }))
        .unwrap(),
    }
}

fn render(source: &str) -> String {
    ChatTemplate::parse(source).unwrap().render(&conversation(), &args()).unwrap()
}

#[test]
fn python_as_templates_use_it() {
    let cases = [
        (
            "{{ messages[1:] | length }} {{ messages[-1].content }} {{ messages[::-1][0].role }}",
            "3 Bye user",
        ),
        ("{{ messages[1].content.strip() }}|{{ messages[1]['content'] | trim }}", "Hi|Hi"),
        ("{{ 'a</t>b'.split('</t>')[-1].lstrip('\\n') }} {{ 'x'.startswith('x') }}", "b True"),
        ("{{ 'abc'.removeprefix('a').removesuffix('c') }} {{ 'k=v'.partition('=')[2] }}", "b v"),
        ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k ~ v }}{% endfor %}", "a1b2"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        (
            "{% for m in messages %}{% if m.role != 'user' %}{% continue %}{% endif %}{{ m.content }},{% endfor %}",
            " Hi ,Bye,",
        ),
        (
            "{{ documents is none }} {{ nope is defined }} {{ nope }}{{ messages[0].nope is defined }}",
            "True False False",
        ),
        ("{{ true }} {{ none }} {{ 1.0 }} {{ [1, 'a'] }}", "True None 1.0 [1, 'a']"),
        ("{% macro m(x, y=2) %}{{ x + y }}{% endmacro %}{{ m(1) }}{{ m(1, y=5) }}", "36"),
        ("{% if 'role' in messages[0] and messages[0].role in ['system'] %}y{% endif %}", "y"),
        (
            "{% for m in messages %}{% generation %}{{ m.role[0] }}{%- endgeneration -%} {% endfor %}",
            "suau",
        ),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
    ];
    for (source, expected) in cases {
        assert_eq!(render(source), expected, "{source}");
    }
}

#[test]
fn json_is_written_as_python_writes_it() {
    assert_eq!(
        render("{{ tools | tojson }}"),
        r#"[{"name": "f", "z": [1, 2.5, true, null], "a": {}, "é": "<&'\""}]"#
    );
    assert_eq!(
        render("{{ tools[0] | tojson(indent=2) }}"),
        "{\n  \"name\": \"f\",\n  \"z\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": {},\n  \"é\": \"<&'\\\"\"\n}"
    );
    assert_eq!(render("{{ 'é🙂\\n' | tojson(ensure_ascii=true) }}"), r#""\u00e9\ud83d\ude42\n""#);
    assert_eq!(
        render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}"),
        r#"{"a":2,"b":1}"#
    );
}

#[test]
fn the_date_is_formatted() {
    let year = jiff::Zoned::now().year().to_string();
    assert_eq!(render("{{ strftime_now('%Y') }}"), year);
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}").len(), 11);
}

#[test]
fn faults_name_their_line() {
    let line = |error: Error| match error {
        Error::Template { line, problem } => (line, problem),
        other => panic!("{other}"),
    };
    assert_eq!(line(ChatTemplate::parse("a\n\n{% if %}").unwrap_err()).0, 3);
    assert_eq!(line(ChatTemplate::parse("x\n{% for x in y %}").unwrap_err()).0, 2);
    let fails = |source: &str| {
        line(ChatTemplate::parse(source).unwrap().render(&conversation(), &args()).unwrap_err())
    };
    assert_eq!(fails("a\n{{ raise_exception('No tools!') }}"), (2, "No tools!".to_owned()));
    assert_eq!(fails("\n\n{{ messages[0].a.b }}").0, 3);
    assert_eq!(fails("\n{{ 1 | nofilter }}").0, 2);
}

#[test]
fn built_in_templates() {
    let render =
        |name: &str| ChatTemplate::builtin(name).unwrap().render(&conversation(), &args()).unwrap();
    assert_eq!(
        render("chatml"),
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n\
         <|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    assert_eq!(
        render("llama2"),
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]"
    );
    assert_eq!(
        render("llama3"),
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(render("mistral"), "<s>[INST] Be kind.\n\n Hi  [/INST] Hello</s>[INST] Bye [/INST]");
    assert_eq!(
        render("gemma"),
        "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello\
         <end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    );
    let error = ChatTemplate::builtin("nope").unwrap_err().to_string();
    assert!(error.starts_with("--chat-template: no template `nope`; there are chatml,"), "{error}");
    assert_eq!(ChatTemplate::from_flag("x{{ 1 }}").unwrap().source(), "x{{ 1 }}");
}

/// What `VKMOE_TEMPLATE_DIR` holds: JSON files of `source` and `cases` (`messages`, `extra`,
/// `add_generation_prompt`, and the `text` that Python's Jinja2 renders, null where it refuses).
#[test]
#[ignore = "needs data that is not in the repository: VKMOE_TEMPLATE_DIR"]
fn real_templates_render_as_in_python() {
    let dir = std::env::var_os("VKMOE_TEMPLATE_DIR")
        .unwrap_or_else(|| panic!("VKMOE_TEMPLATE_DIR is not set"));
    let (mut same, mut different) = (0, Vec::new());
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let data: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let template = ChatTemplate::parse(data["source"].as_str().unwrap());
        for case in data["cases"].as_array().unwrap() {
            let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
            let args = TemplateArgs {
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                extra: case["extra"].as_object().unwrap().clone(),
                ..args()
            };
            let got = template.as_ref().map_err(ToString::to_string);
            let got = got.and_then(|t| t.render(&messages, &args).map_err(|e| e.to_string()));
            // Python refuses a little more: it does not loop over none, for one.
            if case["text"].is_null() || got.as_deref().ok() == case["text"].as_str() {
                same += 1;
            } else {
                different.push(format!(
                    "{} {}: {got:?}\n   {}",
                    path.display(),
                    case["name"],
                    case["text"]
                ));
            }
        }
    }
    assert!(different.is_empty(), "{same} agree; {}", different.join("\n"));
}
