//! GLSL to SPIR-V with shaderc, and reflection of the unoptimized module (optimizing strips names).

use crate::modules::{Compiled, Manifest, ModuleSource, PushField, read};
use rspirv::binary::{Consumer, ParseAction, parse_words};
use rspirv::dr::{Instruction, ModuleHeader, Operand};
use rspirv::spirv::{Decoration, Op, StorageClass};
use shaderc::{CompileOptions, Compiler, EnvVersion, OptimizationLevel, ShaderKind, TargetEnv};
use std::path::Path;

/// Compiles every module. In mode `write` updates `shaders/spirv`; else a difference is an error.
pub(crate) fn bring_up_to_date(
    shaders: &Path,
    sources: &[ModuleSource],
    old: Manifest,
) -> Result<Manifest, String> {
    let write = std::env::var("VKMOE_SHADERS").is_ok_and(|v| v == "write");
    let dir = shaders.join("spirv");
    let mut manifest = Manifest::default();
    for s in sources {
        let spv = dir.join(format!("{}.spv", s.name));
        // While developing, only what changed; a check compiles all.
        let known =
            old.modules.get(&s.name).filter(|m| write && m.source_hash == s.hash && spv.exists());
        let compiled = match known {
            Some(known) => known.clone(),
            None => compile(shaders, s, &spv, write)?,
        };
        if !write && old.modules.get(&s.name) != Some(&compiled) {
            return Err(format!(
                "shaders/spirv/{}.spv is not what its source compiles to; run `./x shaders`",
                s.name
            ));
        }
        manifest.modules.insert(s.name.clone(), compiled);
    }
    if write {
        remove_orphans(&dir, &manifest)?;
        let json = serde_json::to_string_pretty(&manifest).map_err(|e| e.to_string())?;
        crate::write_if_changed(&dir.join("manifest.json"), &(json + "\n"))?;
    }
    Ok(manifest)
}

fn compile(shaders: &Path, s: &ModuleSource, spv: &Path, write: bool) -> Result<Compiled, String> {
    let named = glsl_to_spirv(shaders, s, OptimizationLevel::Zero)?;
    let small = glsl_to_spirv(shaders, s, OptimizationLevel::Performance)?;
    let bytes = small.as_binary_u8();
    if write {
        std::fs::write(spv, bytes).map_err(|e| format!("{}: {e}", spv.display()))?;
    }
    let mut module = Instructions(Vec::new());
    parse_words(named.as_binary(), &mut module).map_err(|e| format!("{}: {e:?}", s.name))?;
    Ok(Compiled {
        source_hash: s.hash.clone(),
        spirv_hash: blake3::hash(bytes).to_hex()[..32].to_string(),
        bindings: bindings(&module.0),
        push: push_constants(&module.0).map_err(|e| format!("{}: {e}", s.name))?,
    })
}

fn glsl_to_spirv(
    shaders: &Path,
    s: &ModuleSource,
    level: OptimizationLevel,
) -> Result<shaderc::CompilationArtifact, String> {
    let compiler = Compiler::new().map_err(|e| e.to_string())?;
    let mut options = CompileOptions::new().map_err(|e| e.to_string())?;
    options.set_target_env(TargetEnv::Vulkan, EnvVersion::Vulkan1_3 as u32);
    options.set_optimization_level(level);
    options.set_warnings_as_errors();
    if level == OptimizationLevel::Zero {
        options.set_generate_debug_info();
    }
    for (name, value) in &s.axes {
        options.add_macro_definition(name, Some(value));
    }
    options.set_include_callback(|wanted, _, _, _| {
        let file = ModuleSource::resolve(&s.axes, wanted);
        let content = read(&shaders.join(&file))?;
        Ok(shaderc::ResolvedInclude { resolved_name: file, content })
    });
    let file = format!("{}.comp", s.source);
    let text = read(&shaders.join(&file))?;
    compiler
        .compile_into_spirv(&text, ShaderKind::Compute, &file, "main", Some(&options))
        .map_err(|e| format!("{}: {e}", s.name))
}

fn remove_orphans(dir: &Path, manifest: &Manifest) -> Result<(), String> {
    let entries = std::fs::read_dir(dir).map_err(|e| e.to_string())?;
    for path in entries.filter_map(|e| Some(e.ok()?.path())) {
        let stem = path.file_name().and_then(|n| n.to_str()?.strip_suffix(".spv"));
        if stem.is_some_and(|stem| !manifest.modules.contains_key(stem)) {
            std::fs::remove_file(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    Ok(())
}

/// All instructions of a module, in order.
struct Instructions(Vec<Instruction>);

impl Consumer for Instructions {
    fn initialize(&mut self) -> ParseAction {
        ParseAction::Continue
    }
    fn finalize(&mut self) -> ParseAction {
        ParseAction::Continue
    }
    fn consume_header(&mut self, _: ModuleHeader) -> ParseAction {
        ParseAction::Continue
    }
    fn consume_instruction(&mut self, instruction: Instruction) -> ParseAction {
        self.0.push(instruction);
        ParseAction::Continue
    }
}

/// Storage buffers that the module declares, as the count of bindings 0..n.
fn bindings(module: &[Instruction]) -> u32 {
    let highest = module.iter().filter(|i| i.class.opcode == Op::Decorate).filter_map(|i| {
        let is_binding = i.operands.get(1) == Some(&Operand::Decoration(Decoration::Binding));
        is_binding.then(|| literal(i, 2)).flatten()
    });
    highest.max().map_or(0, |b| b + 1)
}

/// The members of the push-constant block: names, offsets, types.
fn push_constants(module: &[Instruction]) -> Result<Vec<PushField>, String> {
    let find = |id: u32| module.iter().find(|i| i.result_id == Some(id));
    let is_push = |i: &&Instruction| {
        i.class.opcode == Op::Variable
            && i.operands.first() == Some(&Operand::StorageClass(StorageClass::PushConstant))
    };
    let Some(variable) = module.iter().find(is_push) else {
        return Ok(Vec::new());
    };
    let pointer = variable.result_type.and_then(find).ok_or("push constants without a type")?;
    let block = id(pointer, 1).and_then(find).ok_or("push constants without a block")?;
    let block_id = block.result_id.ok_or("a block without an id")?;
    (0..block.operands.len())
        .map(|m| {
            let ty = id(block, m).and_then(find).ok_or("a member without a type")?;
            let name =
                module.iter().filter(|i| is_member(i, Op::MemberName, block_id, m)).find_map(|i| {
                    if let Some(Operand::LiteralString(s)) = i.operands.get(2) {
                        Some(s.clone())
                    } else {
                        None
                    }
                });
            let offset = module
                .iter()
                .filter(|i| is_member(i, Op::MemberDecorate, block_id, m))
                .filter(|i| i.operands.get(2) == Some(&Operand::Decoration(Decoration::Offset)))
                .find_map(|i| literal(i, 3));
            Ok(PushField {
                name: name.ok_or("a member without a name")?,
                offset: offset.ok_or("a member without an offset")?,
                ty: scalar_name(ty)?,
            })
        })
        .collect()
}

fn is_member(i: &Instruction, op: Op, block: u32, member: usize) -> bool {
    i.class.opcode == op && id(i, 0) == Some(block) && literal(i, 1) == Some(member as u32)
}

fn id(i: &Instruction, operand: usize) -> Option<u32> {
    if let Some(Operand::IdRef(id)) = i.operands.get(operand) { Some(*id) } else { None }
}

fn literal(i: &Instruction, operand: usize) -> Option<u32> {
    if let Some(Operand::LiteralBit32(n)) = i.operands.get(operand) { Some(*n) } else { None }
}

fn scalar_name(ty: &Instruction) -> Result<String, String> {
    match (ty.class.opcode, literal(ty, 0), literal(ty, 1)) {
        (Op::TypeInt, Some(bits), Some(0)) => Ok(format!("u{bits}")),
        (Op::TypeInt, Some(bits), _) => Ok(format!("i{bits}")),
        (Op::TypeFloat, Some(bits), _) => Ok(format!("f{bits}")),
        (op, ..) => Err(format!("push constants hold scalars only, not {op:?}")),
    }
}
