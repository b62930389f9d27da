// Python's view of the simulator (model/simulator.h).
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>

#include "../model/simulator.h"
#include "policy_bindings.h"
#include "tile_bindings.h"

namespace dash_attn {

inline Mapping parse_mapping(std::string const& name) {
  if (name == "counter") return Mapping::kCounter;
  if (name == "independent") return Mapping::kIndependent;
  if (name == "published") return Mapping::kPublished;
  throw py::value_error("mapping must be one of 'counter', 'independent', 'published', got '" + name + "'");
}

inline double duration(char const* argument, double value) {
  if (!(value >= 0) || value > 1e12) {
    throw py::value_error(std::string(argument) + " must be in [0, 1e12], got " + std::to_string(value));
  }
  return value;
}

inline void check(SimulationOptions const& options) {
  in_range("sms", options.sms, 1, 1 << 20);
  duration("product_time", options.product_time);
  if (!(options.spread >= 0 && options.spread < 1)) {
    throw py::value_error("spread must be in [0, 1), got " + std::to_string(options.spread));
  }
  duration("mask_time", options.mask_time);
  duration("add_time", options.add_time);
  duration("signal_time", options.signal_time);
  duration("poll_time", options.poll_time);
  duration("work_time", options.work_time);
  duration("split_time", options.split_time);
  duration("load_time", options.load_time);
  duration("memory_work_time", options.memory_work_time);
  duration("memory_tile_time", options.memory_tile_time);
  duration("cache_time", options.cache_time);
  duration("patience", options.patience);
  in_range("staging", options.staging, 0, 1 << 10);
  in_range("adders", options.adders, 1, std::max(1, options.staging) + 1);
  in_range("loads_ahead", options.loads_ahead, 0, 1 << 10);
  for (double time : options.launch_times) duration("launch_times", time);
}

inline Simulation simulated(std::string const& schedule, Problem const& problem, SimulationOptions const& options) {
  check(options);
  return with_policy(schedule, problem, [&](auto policy) { return simulate<policy()>(problem, options); });
}

inline double longest_path(std::string const& schedule, Problem const& problem, SimulationOptions const& options) {
  check(options);
  return with_policy(schedule, problem, [&](auto policy) { return critical_path<policy()>(problem, options); });
}

inline void bind_simulation(py::module_& m) {
  py::class_<SimulatedTask>(m, "Task",
                            "One tile: its products from start to products_end, its add from add_start to end.")
      .def_readonly("sm", &SimulatedTask::sm)
      .def_readonly("batch", &SimulatedTask::batch)
      .def_readonly("head", &SimulatedTask::head)
      .def_readonly("kv_tile", &SimulatedTask::kv_tile)
      .def_readonly("query_tile", &SimulatedTask::query_tile)
      .def_readonly("start", &SimulatedTask::start)
      .def_readonly("products_end", &SimulatedTask::products_end)
      .def_readonly("add_start", &SimulatedTask::add_start)
      .def_readonly("end", &SimulatedTask::end);

  py::class_<Simulation>(m, "Simulation")
      .def_readonly("makespan", &Simulation::makespan)
      .def_readonly("busy", &Simulation::busy)
      .def_readonly("memory_time", &Simulation::memory_time)
      .def_readonly("num_tasks", &Simulation::num_tasks)
      .def_readonly("tasks", &Simulation::tasks);

  py::class_<SimulationOptions>(m, "SimulationOptions", "A machine and its costs; see csrc/model/simulator.h.")
      .def(py::init())
      .def_readwrite("sms", &SimulationOptions::sms)
      .def_readwrite("product_time", &SimulationOptions::product_time)
      .def_readwrite("spread", &SimulationOptions::spread)
      .def_readwrite("mask_time", &SimulationOptions::mask_time)
      .def_readwrite("add_time", &SimulationOptions::add_time)
      .def_readwrite("signal_time", &SimulationOptions::signal_time)
      .def_readwrite("poll_time", &SimulationOptions::poll_time)
      .def_readwrite("work_time", &SimulationOptions::work_time)
      .def_readwrite("split_time", &SimulationOptions::split_time)
      .def_readwrite("load_time", &SimulationOptions::load_time)
      .def_readwrite("memory_work_time", &SimulationOptions::memory_work_time)
      .def_readwrite("memory_tile_time", &SimulationOptions::memory_tile_time)
      .def_readwrite("miss_time", &SimulationOptions::miss_time)
      .def_readwrite("cache_time", &SimulationOptions::cache_time)
      .def_readwrite("staging", &SimulationOptions::staging)
      .def_readwrite("adders", &SimulationOptions::adders)
      .def_readwrite("loads_ahead", &SimulationOptions::loads_ahead)
      .def_readwrite("ordered", &SimulationOptions::ordered)
      .def_readwrite("patience", &SimulationOptions::patience)
      .def_readwrite("launch_times", &SimulationOptions::launch_times)
      .def_readwrite("record_tasks", &SimulationOptions::record_tasks)
      .def_property(
          "mapping", [](SimulationOptions const& o) { return static_cast<int>(o.mapping); },
          [](SimulationOptions& o, std::string const& name) { o.mapping = parse_mapping(name); });

  m.def("simulate", &simulated, py::arg("schedule"), py::arg("problem"), py::arg("options"),
        py::call_guard<py::gil_scoped_release>(), "Plays a problem under a policy.");
  m.def("critical_path", &longest_path, py::arg("schedule"), py::arg("problem"), py::arg("options"),
        "Time of one head with an SM for every KV tile.");
}

}  // namespace dash_attn
