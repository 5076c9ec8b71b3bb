// A device "cuda" in the host's memory, for a build of torch without CUDA.
//
// Memory of the device is mapped twice: an access of the host to a tensor's address is a
// segmentation fault, kernels use the second mapping. Kernels are those of the CPU. A kernel waits
// in the queue of its stream until the host waits for the stream, the event or the device: without
// a wait, nobody ever sees the numbers of the kernel. Results of a kernel get their shape from
// torch's meta device at once.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr int MOST_DEVICES = 8;
constexpr size_t PAGE = 4096;

size_t number(const char* name, size_t otherwise) {
  const char* given = std::getenv(name);
  return given ? std::stoull(given) : otherwise;
}
const int DEVICES = int(number("EMULATED_DEVICES", 1));
const size_t BYTES = number("EMULATED_BYTES", size_t(8) << 30);

// Of queues and memory. A thread that waits for the lock may hold Python's: nothing that asks for
// Python's lock happens under this lock.
auto& lock = *new std::recursive_mutex;
using Locked = std::lock_guard<std::recursive_mutex>;

// What a test counts: launched kernels, and waits of the host.
using Watch = void (*)(const char* kind, const char* name);
std::atomic<Watch> watch{nullptr};
void seen(const char* kind, const std::string& name) {
  if (Watch told = watch) told(kind, name.c_str());
}

// -- streams -------------------------------------------------------------------------------------

using Task = std::function<void()>;

struct Queue {
  std::deque<Task> tasks;
  uint64_t issued = 0, done = 0, work = 0;  // work: the place of the last task that is no event
};
// By device and number of the stream. Objects of the device are never destroyed: a process may end
// while tasks and tensors are left.
auto& queues = *new std::map<std::pair<int, int64_t>, Queue>;
thread_local int current_device = 0;
thread_local int64_t current_stream[MOST_DEVICES] = {};
int64_t streams = 0;

Queue& queue_of(int device, int64_t stream) {
  Locked l(lock);
  return queues[{device, stream}];
}
Queue& current_queue(int device) { return queue_of(device, current_stream[device]); }

// Ended tasks are destroyed after the lock is released: the tensors of a task may be Python's.
void run(Queue& queue, uint64_t upto, std::vector<Task>& ended) {
  while (queue.done < upto) {
    ended.push_back(std::move(queue.tasks.front()));
    queue.tasks.pop_front();
    queue.done++;
    ended.back()();
  }
}
void run(Queue& queue, uint64_t upto = UINT64_MAX) {
  // Kernels are no business of the modes and of the autograd of whoever waits.
  c10::impl::ForceDispatchKeyGuard plain(
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  std::vector<Task> ended;
  Locked l(lock);
  run(queue, std::min(upto, queue.issued), ended);
}
uint64_t put(Queue& queue, Task task, bool work = true) {
  Locked l(lock);
  queue.tasks.push_back(std::move(task));
  queue.issued++;
  if (work) queue.work = queue.issued;
  return queue.issued;
}
double now() {
  auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}
void run_all(int device) {
  for (auto& [key, queue] : queues)
    if (key.first == device) run(queue);
}

struct Mark {  // the place of an event in a queue
  Queue* queue;
  uint64_t place;
  double seconds = -1;
};
using Event = std::shared_ptr<Mark>;
Event& event_at(void* event) { return *static_cast<Event*>(event); }

// -- memory --------------------------------------------------------------------------------------

struct Memory {
  char *address = nullptr, *content = nullptr;
  std::map<size_t, size_t> holes, used;  // bytes by offset
  size_t top = 0, now = 0, peak = 0;     // bytes
  int64_t grown = 0;                     // times that the top went up

  void start() {
    if (address) return;
    int file = memfd_create("device", 0);
    TORCH_CHECK(ftruncate(file, BYTES) == 0, "no memory for an emulated device");
    auto map = [&](int access) {
      return (char*)mmap(nullptr, BYTES, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    };
    address = map(PROT_NONE), content = map(PROT_READ | PROT_WRITE);
    close(file);
    holes[0] = BYTES;
  }
  bool holds(const void* p) const { return address && p >= address && p < address + BYTES; }

  void* take(size_t bytes) {
    start();
    size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    for (auto [offset, room] : holes) {
      if (room < size) continue;
      holes.erase(offset);
      if (room > size) holes[offset + size] = room - size;
      used[offset] = size;
      if (offset + size > top) top = offset + size, grown++;
      peak = std::max(peak, now += size);
      // A new tensor holds nothing that anybody may rely on.
      memset(content + offset, 0xff, size);
      return address + offset;
    }
    return nullptr;
  }
  void give(size_t offset) {
    size_t size = used.at(offset);
    used.erase(offset), now -= size;
    auto next = holes.lower_bound(offset);
    if (next != holes.end() && offset + size == next->first)
      size += next->second, next = holes.erase(next);
    if (next != holes.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) return void(before->second += size);
    }
    holes[offset] = size;
  }
};
auto& memories = *new std::array<Memory, MOST_DEVICES>;

Memory& memory_of(const void* p) {
  for (auto& memory : memories)
    if (memory.holds(p)) return memory;
  TORCH_CHECK(false, "an address outside of the emulated devices");
}
char* content(const void* p) {
  if (!p) return nullptr;
  Memory& memory = memory_of(p);
  return memory.content + ((char*)p - memory.address);
}
void give(void* p) {
  if (!p) return;
  Locked l(lock);
  Memory& memory = memory_of(p);
  memory.give((char*)p - memory.address);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(c10::kCUDA, current_device);
    if (bytes == 0) return {nullptr, nullptr, &give, device};
    auto take = [&] {
      Locked l(lock);
      return memories[current_device].take(bytes);
    };
    void* p = take();
    if (!p) {  // tasks keep tensors
      run_all(current_device);
      p = take();
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, p, "CUDA out of memory. Tried to allocate ", bytes, " bytes on device ",
        current_device, " with ", BYTES, " bytes (emulated)");
    return {p, p, &give, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    run_all(current_device);
    memcpy(content(to), content(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    Memory& memory = memories[device];
    stats.num_device_alloc = memory.grown;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes})
      (*bytes)[0].current = int64_t(memory.now), (*bytes)[0].peak = int64_t(memory.peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { memories[device].grown = 0; }
  void resetPeakStats(c10::DeviceIndex device) override {
    memories[device].peak = memories[device].now;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {BYTES - memories[device].now, BYTES};
  }
};
Allocator allocator;

auto& pinned = *new std::map<char*, size_t>;
void unpin(void* p) {
  Locked l(lock);
  pinned.erase((char*)p);
  std::free(p);
}
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    Locked l(lock);
    pinned[(char*)p] = bytes + 1;
    return {p, p, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};
Pinned pinned_allocator;
bool is_pinned(const void* p) {
  Locked l(lock);
  auto next = pinned.upper_bound((char*)p);
  if (next == pinned.begin()) return false;
  --next;
  return (char*)p < next->first + next->second;
}

// -- kernels -------------------------------------------------------------------------------------

// The same numbers where kernels may use them; the storage lives as long as the view.
at::Tensor as_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = tensor.storage();
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(
      content(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
      [storage](void*) {}, options);
}
at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}
// A number beside device tensors goes with the launch: later changes do not count.
at::Tensor as_argument(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return as_host(tensor);
  return tensor.dim() == 0 ? tensor.clone() : tensor;
}

template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& one : value.toOptionalTensorVector())
      list.push_back(one ? std::optional(change(*one)) : std::nullopt);
    return list;
  }
  return value;
}
template <class Use>
void each(const IValue& value, Use use) {
  changed(value, [&](const at::Tensor& tensor) { return use(tensor), tensor; });
}
template <class Change>
Stack changed_all(c10::ArrayRef<IValue> values, Change change) {
  Stack all;
  for (const IValue& value : values) all.push_back(changed(value, change));
  return all;
}

// A random kernel has its own numbers: those of the seed and of the count of random kernels.
struct Random {
  uint64_t seed, kernels;
} random_state{0, 0};
at::Generator numbers() {
  Locked l(lock);
  return at::detail::createCPUGenerator(random_state.seed * 1000003 + random_state.kernels++);
}
// Generators of the device compute on the CPU, and only their addresses tell that they are the
// device's.
std::set<const c10::GeneratorImpl*> device_generators;
at::Generator new_generator() {
  Locked l(lock);
  at::Generator made = at::detail::createCPUGenerator();
  device_generators.insert(made.unsafeGetGeneratorImpl());
  return made;
}
void draw_from_device(const c10::FunctionSchema& schema, Stack& arguments) {
  for (size_t i = 0; i < arguments.size(); i++) {
    if (schema.arguments()[i].name() != "generator") continue;
    if (arguments[i].isNone()) {
      arguments[i] = numbers();
      continue;
    }
    Locked l(lock);
    TORCH_CHECK(
        device_generators.count(arguments[i].toGenerator().unsafeGetGeneratorImpl()),
        "Expected a 'cuda' device type for generator but found 'cpu'");
  }
}

// The result of these kernels is a number or a shape that the host has to know.
bool asks(const std::string& name, c10::ArrayRef<IValue> arguments) {
  static const std::set<std::string> asking = {
      "aten::bincount", "aten::equal", "aten::masked_select", "aten::nonzero", "aten::_unique2",
      "aten::unique_consecutive", "aten::unique_dim"};
  if (asking.count(name) || (name == "aten::repeat_interleave" && arguments.size() == 2))
    return true;
  bool found = false;
  if (name.starts_with("aten::index") || name.starts_with("aten::_index"))
    each(arguments[1], [&](const at::Tensor& index) {
      found |= index.defined() &&
          (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte ||
           (!index.is_cuda() && index.dim()));
    });
  return found;
}

c10::Device device_of(const std::string& name, c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  bool index = name.starts_with("aten::index") || name.starts_with("aten::_index");
  for (const IValue& argument : arguments)
    each(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || (!tensor.is_cuda() && (tensor.dim() == 0 || index))) return;
      TORCH_CHECK(
          !device || *device == tensor.device(), "Expected all tensors to be on the same device, ",
          "but found at least two devices, ", *device, " and ", tensor.device(), "! (", name, ")");
      device = tensor.device();
    });
  return device.value_or(c10::Device(c10::kCUDA, current_device));
}

// How many kernels a real device starts: lists of tensors are one kernel only where all tensors
// of a place in the lists are stored alike.
int kernels_of(const std::string& name, c10::ArrayRef<IValue> arguments) {
  if (!name.starts_with("aten::_foreach")) return 1;
  std::vector<std::vector<at::Tensor>> lists;
  for (const IValue& argument : arguments)
    if (argument.isTensorList()) lists.push_back(argument.toTensorVector());
  for (const auto& list : lists)
    for (size_t i = 0; i < list.size(); i++) {
      const at::Tensor &first = lists[0][i], &one = list[i];
      if (one.sizes() != first.sizes() || one.strides() != first.strides() ||
          one.scalar_type() != lists[0][0].scalar_type() || !one.is_non_overlapping_and_dense())
        return int(lists[0].size());
    }
  return 1;
}

// The argument that a result is, if the result is an argument; -1 for new tensors.
int argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!result.alias_info()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* own = schema.arguments()[i].alias_info();
    if (own && own->beforeSets() == result.alias_info()->beforeSets()) return int(i);
  }
  return -1;
}

at::Tensor like(const at::Tensor& meta) {
  if (!meta.defined()) return meta;
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(at::kCUDA));
}

// Run the kernel, and copy its new tensors to `results`.
void compute(
    const c10::OperatorHandle& op, Stack arguments, const std::vector<int>& origins,
    const Stack& results) {
  const std::string& name = op.schema().name();
  if (name == "aten::native_batch_norm_backward" && arguments[2].toTensor().defined())
    for (int saved : {5, 6})  // a device keeps these in float32, a CPU in the type of the weights
      arguments[saved] = arguments[saved].toTensor().to(arguments[2].toTensor().scalar_type());
  try {
    op.callBoxed(&arguments);
  } catch (const c10::Error& error) {  // the host is elsewhere by now
    TORCH_CHECK(false, name, ": ", error.what_without_backtrace());
  }
  for (size_t i = 0; i < results.size(); i++) {
    if (origins[i] >= 0) continue;
    std::vector<at::Tensor> made;
    each(arguments[i], [&](const at::Tensor& tensor) { made.push_back(tensor); });
    size_t next = 0;
    each(results[i], [&](const at::Tensor& tensor) {
      const at::Tensor& one = made[next++];
      if (one.defined() && one.numel()) const_cast<at::Tensor&>(tensor).copy_(one);
    });
  }
}

void launch(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  c10::Device device = device_of(name, arguments);
  c10::DeviceGuard guard(device);
  c10::impl::ForceDispatchKeyGuard plain(
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  Queue& queue = current_queue(device.index());
  std::vector<int> origins;
  bool fresh = false;
  for (const auto& result : schema.returns()) {
    origins.push_back(argument_of(schema, result));
    fresh |= origins.back() < 0;
  }
  bool known = !asks(name, arguments);
  Stack shapes = changed_all(arguments, as_meta);
  if (known && (fresh || schema.overload_name().find("out") != std::string::npos)) {
    Stack given = shapes;
    try {
      op.callBoxed(&shapes);
    } catch (const c10::Error& error) {
      if (std::getenv("EMULATED_VERBOSE"))
        fprintf(stderr, "%s: %s\n", name.c_str(), error.what_without_backtrace());
      known = false;
    }
    for (size_t i = 0; known && i < given.size(); i++)  // results that were given too small
      if (given[i].isTensor() && given[i].toTensor().defined() && given[i].toTensor().is_meta() &&
          given[i].toTensor().sizes() != arguments[i].toTensor().sizes())
        arguments[i].toTensor().resize_(given[i].toTensor().sizes());
  }
  Stack host = changed_all(arguments, as_argument);
  draw_from_device(schema, host);
  Stack results;
  if (known) {
    for (int count = kernels_of(name, arguments); count; count--) seen("kernel", name);
    Stack views;
    for (size_t i = 0; i < origins.size(); i++) {
      results.push_back(origins[i] < 0 ? changed(shapes[i], like) : arguments[origins[i]]);
      views.push_back(origins[i] < 0 ? changed(results[i], as_host) : IValue());
    }
    put(queue, [op, host, origins, views] { compute(op, host, origins, views); });
    if (name == "aten::_linalg_eigh" || name == "aten::_linalg_svd") {  // torch looks for failures
      seen("wait", name);
      run(queue);
    }
  } else {  // only the kernel knows the shape of the result
    seen("wait", name);
    run(queue);
    op.callBoxed(&host);
    for (size_t i = 0; i < origins.size(); i++)
      results.push_back(
          origins[i] >= 0 ? IValue(arguments[origins[i]])
                          : changed(host[i], [&](const at::Tensor& tensor) {
                              at::Tensor made = like(tensor);
                              if (tensor.defined() && tensor.numel()) as_host(made).copy_(tensor);
                              return made;
                            }));
  }
  if (name.starts_with("aten::_foreach"))  // for others, torch counts before the device is asked
    for (size_t i = 0; i < arguments.size(); i++)
      if (const auto* alias = schema.arguments()[i].alias_info(); alias && alias->isWrite())
        each(arguments[i], [](const at::Tensor& t) { t.unsafeGetTensorImpl()->bump_version(); });
  torch::jit::drop(*stack, schema.arguments().size());
  for (IValue& result : results) stack->push_back(std::move(result));
}

// -- what cannot be a kernel of the CPU ----------------------------------------------------------

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type),
      format);
}
at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(type));
}

at::Tensor zeros(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  return empty(C10_AS_INTARRAYREF_SLOW(size), type, layout, device, pinned, std::nullopt).zero_();
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  bool down = !self.is_cuda(), up = !source.is_cuda();
  int device = (down ? source : self).device().index();
  Queue& queue = current_queue(device);
  at::Tensor to = as_host(self), from = as_host(source);
  if (down && non_blocking) {  // until somebody waits, the host sees nothing of use
    self.is_floating_point() ? self.fill_(NAN) : self.fill_(77);
  } else if (up && non_blocking && !is_pinned(source.const_data_ptr())) {
    from = source.clone();
  }
  uint64_t place = put(queue, [to, from] { const_cast<at::Tensor&>(to).copy_(from); });
  seen("kernel", down ? "copy to host" : up ? "copy to device" : "aten::copy_");
  if ((down || up) && !non_blocking) {
    seen("wait", down ? "copy to host" : "copy to device");
    run(queue, place);
  }
  if (!down && !up && self.device() != source.device()) {  // both devices wait for the copy
    run_all(source.device().index());
    run(queue, place);
  }
  return self;
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  c10::DeviceGuard guard(self.device());
  auto* own = self.unsafeGetTensorImpl();
  own->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (own->numel() + own->storage_offset()) * self.dtype().itemsize();
  auto* storage = own->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    run(current_queue(current_device));
    auto fresh = allocator.allocate(bytes);
    if (storage->nbytes()) memcpy(content(fresh.get()), content(storage->data()), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  }
  return self;
}

at::Scalar item(const at::Tensor& self) {
  seen("wait", "item");
  run(current_queue(self.device().index()));
  return as_host(self).item();
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}
at::Tensor reshape_alias(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
at::Tensor& set_(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  own->set_storage_offset(offset);
  own->set_sizes_and_strides(size, stride);
  return self;
}

void foreach_copy_(at::TensorList filled, at::TensorList sources, bool non_blocking) {
  bool mixed = false;
  for (size_t i = 0; i < filled.size(); i++)
    mixed |= filled[i].device() != sources[i].device();
  if (mixed) {  // as a GPU does: one by one
    for (size_t i = 0; i < filled.size(); i++) filled[i].copy_(sources[i], non_blocking);
    return;
  }
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::_foreach_copy_", "");
  Stack stack{filled, sources, non_blocking};
  launch(op, &stack);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& self, double p, std::optional<bool>) {
  at::Tensor mask = at::empty_like(self, self.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {self * mask / (1 - p), mask};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor sum = input_gates + hidden_gates;
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) sum = sum + *bias;
  auto gates = sum.chunk(4, 1);
  at::Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), out = gates[3].sigmoid();
  at::Tensor change = gates[2].tanh(), next = forget * cell + in * change;
  return {out * next.tanh(), next, at::cat({in, forget, change, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& of_output, const std::optional<at::Tensor>& of_cell,
    const at::Tensor& cell, const at::Tensor& next, const at::Tensor& gates, bool has_bias) {
  auto parts = gates.chunk(4, 1);
  at::Tensor in = parts[0], forget = parts[1], change = parts[2], out = parts[3];
  at::Tensor squashed = next.tanh(), gradient = at::zeros_like(cell), of_out = gradient;
  if (of_cell && of_cell->defined()) gradient = *of_cell;
  if (of_output && of_output->defined()) {
    of_out = *of_output * squashed;
    gradient = gradient + *of_output * out * (1 - squashed * squashed);
  }
  at::Tensor of_gates = at::cat(
      {gradient * change * in * (1 - in), gradient * cell * forget * (1 - forget),
       gradient * in * (1 - change * change), of_out * out * (1 - out)}, 1);
  return {of_gates, gradient * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto with = [](const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
    return (bias && bias->defined() ? gates + *bias : gates).chunk(3, 1);
  };
  auto in = with(input_gates, input_bias), from = with(hidden_gates, hidden_bias);
  at::Tensor reset = (in[0] + from[0]).sigmoid(), keep = (in[1] + from[1]).sigmoid();
  at::Tensor fresh = (in[2] + reset * from[2]).tanh();
  return {
      (hidden - fresh) * keep + fresh, at::cat({reset, keep, fresh, hidden, from[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& kept, bool has_bias) {
  auto parts = kept.chunk(5, 1);
  at::Tensor reset = parts[0], keep = parts[1], fresh = parts[2], hidden = parts[3];
  at::Tensor of_fresh = gradient * (1 - keep) * (1 - fresh * fresh);
  at::Tensor of_keep = gradient * (hidden - fresh) * keep * (1 - keep);
  at::Tensor of_reset = of_fresh * parts[4] * reset * (1 - reset);
  at::Tensor of_input = at::cat({of_reset, of_keep, of_fresh}, 1);
  at::Tensor of_hidden = at::cat({of_reset, of_keep, of_fresh * reset}, 1);
  auto sum = [&](const at::Tensor& one) { return has_bias ? one.sum(0) : at::Tensor(); };
  return {of_input, of_hidden, gradient * keep, sum(of_input), sum(of_hidden)};
}

// Products of rounded numbers that add up in float32, which the CPU lacks.
at::Tensor mm(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  return at::mm(a.to(type), b.to(type));
}
at::Tensor bmm(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  return at::bmm(a.to(type), b.to(type));
}

// -- torch's view of the device ------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static Device on(int index) { return Device(c10::kCUDA, c10::DeviceIndex(index)); }
  static int index(Device device) { return device.has_index() ? device.index() : current_device; }

  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    return on(std::exchange(current_device, index(device)));
  }
  Device getDevice() const override { return on(current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(index(device) < DEVICES, "CUDA error: invalid device ordinal ", device);
    current_device = index(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index(device);
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, on(index(device)), current_stream[index(device)]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, on(index(device)));
  }
  Stream getNewStream(Device device, int) const override {
    Locked l(lock);
    return Stream(Stream::UNSAFE, on(index(device)), ++streams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    int device = index(stream.device());
    return Stream(
        Stream::UNSAFE, on(device), std::exchange(current_stream[device], stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(DEVICES); }

  static Queue& of(const Stream& stream) { return queue_of(index(stream.device()), stream.id()); }
  void record(
      void** event, const Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto mark = std::make_shared<Mark>(Mark{&of(stream), 0});
    Locked l(lock);
    // A stream without work reaches the event at once, even if the host hears of it later.
    if (mark->queue->done >= mark->queue->work) mark->seconds = now();
    auto reach = [mark = mark.get(), kept = std::weak_ptr<Mark>(mark)] {
      if (kept.lock() && mark->seconds < 0) mark->seconds = now();
    };
    mark->place = put(*mark->queue, reach, false);
    event_at(*event) = mark;
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Event mark = event_at(event);
    put(of(stream), [mark] { run(*mark->queue, mark->place); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Event mark = event_at(event);
    {
      Locked l(lock);
      if (mark->queue->done >= mark->place) return true;
    }
    run(*mark->queue, mark->place);  // who asks again will hear of it
    return false;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    seen("wait", "event");
    if (event) run(*event_at(event)->queue, event_at(event)->place);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    double from = event_at(start)->seconds, to = event_at(end)->seconds;
    TORCH_CHECK(from >= 0 && to >= 0, "an event is not complete");
    return (to - from) * 1e3;
  }
  bool queryStream(const Stream& stream) const override {
    Queue& queue = of(stream);
    bool done = queue.done == queue.issued;
    run(queue);
    return done;
  }
  void synchronizeStream(const Stream& stream) const override {
    seen("wait", "stream");
    run(of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    seen("wait", "device");
    run_all(device);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(DEVICES); }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(::current_device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { ::current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return c10::DeviceIndex(std::exchange(::current_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Device getDeviceFromPtr(void* p) const override {
    return Guard::on(int(&memory_of(p) - memories.data()));
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return new_generator();
  }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    Guard().synchronizeDevice(device);
  }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace {
struct AtLoad {
  AtLoad() { c10::SetAllocator(c10::kCUDA, &allocator, 100); }
} at_load;
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(zeros));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  // Without a device's own library, torch would take kernels apart that are one kernel there.
  for (const char* whole : {"convolution", "convolution_backward"})
    m.impl(whole, torch::CppFunction::makeFromBoxedFunction<&launch>());
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name == "aten::_foreach_copy_")
      m.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
    else if (op.name.starts_with("aten::_foreach"))
      m.impl(
          c10::toString(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&launch>());
}
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", TORCH_FN(mm));
  m.impl("bmm.dtype", TORCH_FN(bmm));
}
TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

extern "C" {
void emulated_watch(Watch told) { watch = told; }
char* emulated_content(char* p) { return content(p); }
int emulated_devices() { return DEVICES; }
Random* emulated_random() { return &random_state; }
}
